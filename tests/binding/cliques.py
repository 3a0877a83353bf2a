"""Communicators for a test, closed at the end of a block."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pynccl
from pynccl import Communicator, Work


@contextlib.asynccontextmanager
async def clique(size: int, *, warm: bool = False, **options: Any) -> AsyncIterator[list[Any]]:
    """All ranks of a communicator in this process, on devices 0 to size - 1.

    With one rank an operation is issued inline from the second of its kind on (`warm` does the
    first); with several each goes through its rank's lane. A block that raises aborts them.
    """
    comms: list[Communicator] = await pynccl.create_all(
        [f"cpu:{i}" for i in range(size)], **options
    )
    try:
        if warm:
            await all_reduced(comms)
        yield comms
    except BaseException:
        await abort(comms)
        raise
    await asyncio.gather(*(comm.close() for comm in comms))


async def abort(comms: Sequence[Communicator]) -> None:
    """Abort them all; a rank that closes beside one that aborts hears of a lost peer."""
    outcomes = await asyncio.gather(*(comm.abort() for comm in comms))
    assert outcomes == ["clean"] * len(comms)


def arrays(comms: Sequence[Communicator], count: int = 4) -> list[NDArray[np.float32]]:
    """An array a rank, full of rank + 1."""
    return [np.full(count, comm.rank + 1, np.float32) for comm in comms]


def reduce_all(comms: Sequence[Communicator], xs: Sequence[Any], **options: Any) -> list[Work]:
    """Issue an all-reduce on every rank."""
    return [comm.all_reduce(x, **options) for comm, x in zip(comms, xs, strict=True)]


async def all_reduced(comms: Sequence[Communicator], count: int = 4) -> None:
    """Prove that the communicators work: an all-reduce gives every rank the right sum."""
    xs = arrays(comms, count)
    await pynccl.wait(*reduce_all(comms, xs))
    total = sum(range(1, len(comms) + 1))
    for x in xs:
        assert x.tolist() == [total] * count


async def gone(counter: str, left: int = 0) -> None:
    """Wait until no more than so many are counted alive, as long as that may take."""
    for _ in range(250):
        if pynccl.diagnostics()[counter] <= left:
            return
        await asyncio.sleep(0.002)
    assert pynccl.diagnostics()[counter] <= left
