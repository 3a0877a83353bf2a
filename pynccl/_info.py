"""What is loaded and what is alive: for bug reports, and for tests of leaks."""

from __future__ import annotations

from typing import Any

from pynccl import _engines
from pynccl._native.lifecycle import live


def library_info() -> dict[str, Any]:
    """The engines that are open: NCCL's version, the files, and how they were found.

    ``mapped_copies`` are the files of every libnccl in this process, others' included.
    Opens nothing: an engine appears here when its first device has been used.
    """
    info: dict[str, Any] = {}
    for kind, (engine, how) in _engines.opened().items():
        code = engine.version
        info[kind] = {
            "version": f"{code // 10000}.{code // 100 % 100}.{code % 100}",
            "nccl": engine.path("ncclGetVersion"),
            "cuda": engine.path("cuInit"),
            "driver": f"{engine.driver_version // 1000}.{engine.driver_version % 1000 // 10}",
            "found": how,
        }
    info["mapped_copies"] = _engines.mapped_copies()
    return info


def diagnostics() -> dict[str, Any]:
    """Counts of live native objects, and of what had to be given up.

    Live: operations, communicators, streams, events, gates, lanes, running aborts, event loops,
    allocations of ``pynccl.empty``, registrations, operators.
    Given up: abandoned communicators, stuck threads, repaired group depths.
    """
    return dict(live())
