"""Whether a call waits on the host for a peer that is late.

NCCL connects the ranks for an algorithm when it is first chosen, inside the call, and waits for
the peers there. pynccl makes the first call of a kind, reduction, type and size class on a
worker thread, and later ones inline: those must not wait.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import abi
from .stage import Stage

LATE_S = 0.1
WAITED_S = LATE_S / 2
SIZES = (("8 B", 2), ("4 MiB", 1 << 20))
PEER_TO_PEER = ("ncclSend", "ncclRecv")


@dataclass
class Calls:
    """The calls of one rank, each with the peer's counterpart; rank 0 depends on rank 1."""

    stage: Stage
    comm: int
    stream: int
    send: int
    recv: int
    times: dict[str, float] = field(default_factory=dict)

    def make(self, kind: str, count: int) -> None:
        """One call of a kind, `count` float32 numbers a rank."""
        api, rank = self.stage.api, self.stage.rank
        buffers, where = (self.send, self.recv), (self.comm, self.stream)
        arguments: dict[str, Callable[[], tuple[int, ...]]] = {
            "ncclAllReduce": lambda: (*buffers, count, abi.FLOAT32, abi.SUM, *where),
            "ncclBroadcast": lambda: (*buffers, count, abi.FLOAT32, 1, *where),
            "ncclReduce": lambda: (*buffers, count, abi.FLOAT32, abi.SUM, 0, *where),
            "ncclAllGather": lambda: (*buffers, count, abi.FLOAT32, *where),
            "ncclReduceScatter": lambda: (*buffers, count, abi.FLOAT32, abi.SUM, *where),
            "ncclAlltoAll": lambda: (*buffers, count, abi.FLOAT32, *where),
            "ncclGather": lambda: (*buffers, count, abi.FLOAT32, 0, *where),
            "ncclScatter": lambda: (*buffers, count, abi.FLOAT32, 1, *where),
        }
        if kind in PEER_TO_PEER:
            sends = (kind == "ncclSend") == (rank == 0)
            name, buffer = ("ncclSend", self.send) if sends else ("ncclRecv", self.recv)
            api.call(name, buffer, count, abi.FLOAT32, 1 - rank, *where)
        else:
            api.call(kind, *arguments[kind]())

    def late(self, label: str, kind: str, count: int) -> float:
        """Make a call while rank 1 is late with it: rank 0's seconds inside the call."""
        stage = self.stage
        stage.notebook.doing(label)
        stage.board.meet()
        if stage.rank == 1:
            time.sleep(LATE_S)
        start = time.perf_counter()
        self.make(kind, count)
        took = time.perf_counter() - start
        stage.finish(self.stream)
        self.times[label] = took
        return took

    def waited(self, which: str, kinds: Sequence[str]) -> list[str]:
        """The kinds whose first or second call of a size waited for rank 1."""
        return [kind for kind in kinds if self.times[f"{kind}, {which}"] > WAITED_S]


KINDS = (
    "ncclAllReduce",
    "ncclBroadcast",
    "ncclReduce",
    "ncclAllGather",
    "ncclReduceScatter",
    "ncclAlltoAll",
    "ncclGather",
    "ncclScatter",
    *PEER_TO_PEER,
)


def run(stage: Stage, at_init: bool, kinds: Sequence[str] = KINDS) -> None:
    """Two calls of each kind and size, each with the peer late; then registered buffers.

    Args:
        stage: two ranks.
        at_init: connections are made at init (NCCL_RUNTIME_CONNECT=0).
        kinds: the functions to call; one that this NCCL lacks is left out.
    """
    comm = stage.communicator()
    nbytes = stage.ranks * 4 * max(count for _, count in SIZES)
    calls = Calls(stage, comm, stage.stream(), stage.memory(nbytes), stage.memory(nbytes))
    kinds = [kind for kind in kinds if _has(stage, kind)]
    for kind in kinds:
        for size, count in SIZES:
            for time_of in ("first", "second"):
                calls.late(f"{kind}, {time_of} of {size}", kind, count)
    if stage.rank == 0:
        _report(stage, calls, kinds, at_init)
    _registered(stage, calls)


def _has(stage: Stage, kind: str) -> bool:
    try:
        return getattr(stage.api, kind) is not None
    except abi.NotTried:
        return False


def _report(stage: Stage, calls: Calls, kinds: Sequence[str], at_init: bool) -> None:
    note = stage.notebook
    small, large = (size for size, _ in SIZES)
    first_small = calls.waited(f"first of {small}", kinds)
    first_large = calls.waited(f"first of {large}", kinds)
    second = [
        one for size in (small, large) for one in calls.waited(f"second of {size}", kinds)
    ]
    longest = max(took for label, took in calls.times.items() if "second" in label)
    note.measure(
        kinds=len(kinds),
        first_that_waited=first_small or "none",
        first_of_another_size_that_waited=first_large or "none",
        longest_second_ms=round(longest * 1e3, 3),
    )
    note.check("no second call of a kind and size waited for the late peer", not second, second)
    if at_init:
        early = [kind for kind in first_small + first_large if kind not in PEER_TO_PEER]
        note.check("no first collective waited either", not early, early)


def _registered(stage: Stage, calls: Calls) -> None:
    """Measured only: pynccl never makes a call with a registered buffer inline."""
    count = SIZES[1][1]
    nbytes = 4 * count
    try:
        for name in ("send", "recv"):
            memory = stage.api.made("ncclMemAlloc", nbytes)
            handle = ctypes.c_void_p()
            stage.api.call("ncclCommRegister", calls.comm, memory, nbytes, ctypes.byref(handle))
            setattr(calls, name, memory)
    except (abi.NotTried, abi.CallError) as reason:
        stage.notebook.measure(registered=f"not tried: {reason}")
        return
    for time_of in ("first", "second"):
        took = calls.late(f"{time_of} registered", "ncclAllReduce", count)
        if stage.rank == 0:
            stage.notebook.measure(**{f"registered_{time_of}_ms": round(took * 1e3, 3)})
