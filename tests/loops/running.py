"""Communicators for a test of a loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pynccl
from pynccl import Communicator


@contextlib.asynccontextmanager
async def alone(device: str = "cpu:0", *, warm: bool = True) -> AsyncIterator[Any]:
    """A communicator of one rank; with `warm` it has had its first operation."""
    comm = await Communicator.create(1, 0, await pynccl.unique_id(device), device=device)
    async with comm:
        if warm:
            await comm.all_reduce(ones())
        yield comm


@contextlib.asynccontextmanager
async def on_noop() -> AsyncIterator[Any]:
    """A communicator of the engine whose operations end at once."""
    before = os.environ.get("PYNCCL_ENGINE")
    os.environ["PYNCCL_ENGINE"] = "noop"
    try:
        comm = await Communicator.create(1, 0, await pynccl.unique_id(0), device=0)
    finally:
        if before is None:
            del os.environ["PYNCCL_ENGINE"]
        else:
            os.environ["PYNCCL_ENGINE"] = before
    async with comm:
        yield comm


@contextlib.asynccontextmanager
async def pair(*, warm: bool = True) -> AsyncIterator[list[Any]]:
    """Both ranks of a communicator in this process, on devices 0 and 1; aborted by an error."""
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    try:
        if warm:
            await pynccl.wait(*(comm.all_reduce(ones()) for comm in comms))
        yield comms
    except BaseException:
        await asyncio.gather(*(comm.abort() for comm in comms))
        raise
    await asyncio.gather(*(comm.close() for comm in comms if comm.state != "closed"))


def ones(count: int = 4) -> NDArray[np.float32]:
    return np.ones(count, np.float32)


async def awaited(work: Any) -> Any:
    """A coroutine of a work, for what takes nothing else."""
    return await work
