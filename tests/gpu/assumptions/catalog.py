"""The assumptions: their questions, and the cases in which each is tried.

An assumption that another one needs comes before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Layout = Literal["processes", "threads"]

#: Two ranks share a GPU only with these; a third would need a smaller number of CTAs.
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}


@dataclass(frozen=True)
class Case:
    """One way to try an assumption; it runs in fresh processes."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    layout: Layout | None = None
    """Where the ranks are; None: wherever two ranks on one GPU have been seen to work."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """None takes a variable away."""


@dataclass(frozen=True)
class Assumption:
    """One question, answered by the module of the same name."""

    name: str
    question: str
    cases: tuple[Case, ...]


FACTS = Assumption("facts", "What is here?", (Case("facts", ranks=1),))

CATALOG = (
    Assumption(
        "sharing",
        "Do two ranks on one GPU work, as threads of a process and as processes?",
        (Case("processes", layout="processes"), Case("threads", layout="threads")),
    ),
    Assumption(
        "issue",
        "Is an all-reduce with its event issued in microseconds, and do the 128 that may be in "
        "flight fit into a held stream before a launch blocks?",
        (Case("all-reduce"),),
    ),
    Assumption(
        "inline",
        "Does the second call of a kind and size never wait on the host for a late peer?",
        (
            Case(
                "connect-late", {"at_init": False}, environment={"NCCL_RUNTIME_CONNECT": None}
            ),
            Case(
                "connect-at-init", {"at_init": True}, environment={"NCCL_RUNTIME_CONNECT": "0"}
            ),
        ),
    ),
    Assumption(
        "abort",
        "Does the abort sequence (group, abort, wait for the thread inside, end of the group) "
        "end while the peer does nothing?",
        tuple(
            Case(inside, {"inside": inside})
            for inside in ("init", "split", "first-call", "kernel", "graph")
        ),
    ),
    Assumption(
        "aborted_event",
        "Does the event behind an aborted operation say success, with a result that is none?",
        (Case("all-reduce"),),
    ),
    Assumption(
        "polling",
        "Does another thread's capture in global mode survive an event query in relaxed mode, "
        "and only in relaxed mode?",
        (
            Case("relaxed", {"relaxed": True}, ranks=1),
            Case("not-relaxed", {"relaxed": False}, ranks=1),
        ),
    ),
    Assumption(
        "gates",
        "Can a stream be held by a word of pinned memory, and released by the host and by "
        "another stream?",
        (
            Case("host-store", {"release": "host"}, ranks=1),
            Case("stream-write", {"release": "stream"}, ranks=1),
            Case("many-held", {"release": "many"}, ranks=1),
        ),
    ),
    Assumption(
        "handoff",
        "Is a running kernel's output seen by an all-reduce with no host wait between, and its "
        "result by what comes after work.order(stream)?",
        tuple(Case(library, {"library": library}) for library in ("torch", "cupy", "numpy")),
    ),
)
