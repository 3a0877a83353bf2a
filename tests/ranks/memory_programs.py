"""Rank functions on memory of pynccl's own: collectives without staging, one-sided calls."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

import pynccl
from pynccl import _engines

COUNT = 1_000_003  # 4 MB: ordinary memory of other processes goes through staging


def staged() -> int:
    """Bytes that this process has given its peers through shared slots."""
    path = _engines.engine("host").path("cuInit")
    assert path is not None
    count = ctypes.CDLL(path).pn_host_staged
    count.restype = ctypes.c_uint64
    return int(count())


async def unstaged(comm: Any) -> dict[str, int]:
    """Run collectives in own and in NumPy's memory; return the staged bytes of each."""
    total = sum(range(1, comm.size + 1))
    found = {}
    for kind in ("own", "numpy"):
        if kind == "own":
            x = pynccl.empty(COUNT, device=comm)
            gathered = pynccl.empty((comm.size, COUNT), device=comm)
        else:
            x = np.empty(COUNT, np.float32)
            gathered = np.empty((comm.size, COUNT), np.float32)
        np.asarray(x)[:] = comm.rank + 1
        before = staged()
        await comm.all_reduce(x)
        await comm.all_gather(x, out=gathered)
        await comm.broadcast(x, root=comm.size - 1)
        found[kind] = staged() - before
        if not (np.asarray(x) == total).all() or not (np.asarray(gathered) == total).all():
            raise AssertionError(f"wrong sums in {kind} memory")
    return found


async def puts(comm: Any) -> bool:
    """Write round the ring into windows; whether what the neighbours wrote has arrived."""
    x = pynccl.empty((2, COUNT), device=comm)
    rows = np.asarray(x)
    following, leading = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    async with comm.register_window(x) as window:
        for turn in range(10):
            rows[0] = comm.rank + 100 * turn
            await comm.put(x[0], window, following, offset=4 * COUNT)
            await comm.wait_signal(leading)
            if not (rows[1] == leading + 100 * turn).all():
                return False
            await comm.signal(leading)  # it may be written again
            await comm.wait_signal(following)
    return True
