"""A heartbeat goes on while a call waits for a rank of another process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from heartbeat import Heartbeat, require_free
from running import alone
from support.ranks import run_processes

from pynccl import testing
from pynccl.errors import AbortedError

pytestmark = [pytest.mark.timing, pytest.mark.timeout(150)]


async def late_peer(comm: Any, how: str, seconds: float) -> dict[str, float]:
    """Rank function: rank 1 comes late to its first operation of a kind; rank 0 waits."""
    x = np.ones(8, np.float32)

    def issue() -> Any:
        if how == "collective":
            return comm.all_gather(x)
        return comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)

    if comm.rank == 1:
        time.sleep(seconds)  # noqa: ASYNC251 (a rank that does not answer at all)
    start = time.monotonic()
    async with Heartbeat() as heartbeat:
        work = issue()
        called = time.monotonic() - start
        await work
        waited = time.monotonic() - start
        for _ in range(3):
            await issue()
    return {"gap": heartbeat.worst, "call": called * 1e3, "wait": waited}


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
@pytest.mark.parametrize("how", ["collective", "message"])
@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_peer_that_is_late(kind: str, how: str, temper: Any) -> None:
    """In the gpulike temper the first contact blocks the native call until the peer comes."""
    seconds = 5.0 if kind == "asyncio" and how == "collective" else 1.0
    gaps, calls = [], []
    for _ in range(3):
        seen = run_processes(
            2,
            late_peer,
            temper=temper,
            arguments=[how, seconds],
            env={"PYNCCL_TEST_LOOP": kind},
        )[0]
        assert how == "message" or seen["wait"] > seconds - 1
        gaps.append(seen["gap"])
        calls.append(seen["call"])
        if gaps[-1] < 20:
            break
    require_free(gaps, f"a peer that is {seconds:g} s late")
    require_free(calls, "the call itself")


async def gone_peer(comm: Any) -> float:
    """Rank function: rank 1 never comes; rank 0 gives up by an abort."""
    x = np.ones(8, np.float32)
    if comm.rank == 1:
        await asyncio.sleep(2)
        await comm.abort()
        return 0.0
    async with Heartbeat() as heartbeat:
        works = [comm.all_gather(x), comm.all_reduce(x)]
        await asyncio.sleep(0.3)
        start = time.monotonic()
        aborted = asyncio.ensure_future(comm.abort())
        for work in works:
            with pytest.raises(AbortedError):
                await work
        assert time.monotonic() - start < 0.5
        assert await aborted == "clean"
        assert time.monotonic() - start < 1.0
    return heartbeat.worst


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
def test_a_peer_that_never_comes(temper: Any) -> None:
    gaps = []
    for _ in range(3):
        gaps.append(run_processes(2, gone_peer, temper=temper)[0])
        if gaps[-1] < 20:
            break
    require_free(gaps, "an abort beside a first contact")


async def back_and_forth(comm: Any, turns: int) -> dict[str, Any]:
    """Rank function: awaits that end while they poll must let the loop have its turn."""
    x = np.ones(2, np.float32)
    comm.spin_us = 200
    await comm.all_reduce(x, op="max")
    async with Heartbeat() as heartbeat:
        for _ in range(turns):
            await comm.all_reduce(x, op="max")
    return {"gap": heartbeat.worst, "beats": heartbeat.beats}


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_awaits_that_never_suspend(kind: str, temper: Any) -> None:
    gaps = []
    for _ in range(4):
        turns = 20_000 if temper == "quick" else 2000
        seen = run_processes(
            2,
            back_and_forth,
            temper=temper,
            arguments=[turns],
            env={"PYNCCL_TEST_LOOP": kind},
        )
        gaps.append(seen[0]["gap"])
        assert seen[0]["beats"] > 3
        if gaps[-1] < 20:
            break
    require_free(gaps, "awaits that end while they poll")


async def polls_alone(place: Any) -> float:
    """Rank function: one rank whose operations take a little less than the await's patience."""
    async with alone() as comm:
        comm.spin_us = 500
        x = np.ones(2, np.float32)
        with testing.faults("op:delay=50us"):
            async with Heartbeat() as heartbeat:
                for _ in range(2000):
                    await comm.all_reduce(x)
        return heartbeat.worst


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
def test_operations_that_end_within_the_spin(temper: Any) -> None:
    gaps = []
    for _ in range(4):
        gaps += run_processes(1, polls_alone, temper=temper, bare=True)
        if gaps[-1] < 20:
            break
    require_free(gaps, "operations that end while they are polled")
