"""After a hundred expired deadlines everything is back, or is named by the diagnostics."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cliques import abort, all_reduced, clique

import pynccl
from pynccl import DeadlineError, testing

ROUNDS = 100
LIMIT = 0.01


def resources() -> dict[str, int]:
    """The process's threads and descriptors, and every count of the diagnostics."""
    counts = dict(pynccl.diagnostics())
    del counts["events"]  # idle ones are kept for the next operation
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "python threads": threading.active_count(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        **counts,
    }


async def come_back(before: dict[str, int]) -> dict[str, int]:
    """What is more than it was, once it has had time to go."""
    end = time.perf_counter() + 5
    while True:
        gc.collect()
        more = {name: n - before[name] for name, n in resources().items() if n > before[name]}
        if not more or time.perf_counter() > end:
            return more
        await asyncio.sleep(0.02)


async def warm_up() -> None:
    """What is made once: the loop's mailbox, the waiter, the threads of asyncio's executor."""
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.01) for _ in range(40)))
    async with clique(2) as comms:
        await all_reduced(comms)


async def expired_operation() -> None:
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    with pytest.raises(DeadlineError):
        await comms[0].all_reduce(np.ones(4), timeout=LIMIT)
    await abort(comms)


async def expired_init() -> None:
    with testing.faults("init:stuck,rank=1"), pytest.raises(DeadlineError):
        await pynccl.create_all(["cpu:0", "cpu:1"], timeout=LIMIT)


async def expired_split() -> None:
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    with pytest.raises(DeadlineError):
        await comms[0].split(0, timeout=LIMIT)
    await abort(comms)


async def expired_close() -> None:
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    with testing.faults("finalize:stuck"), pytest.raises(DeadlineError):
        await comms[0].close(timeout=LIMIT)
    await abort(comms[1:])


Round = Callable[[], Coroutine[Any, Any, None]]


@pytest.mark.parametrize(
    "expire", [expired_operation, expired_init, expired_split, expired_close]
)
async def test_a_hundred_deadlines(temper: str, expire: Round) -> None:
    await warm_up()
    await expire()
    gc.collect()
    before = resources()
    for _ in range(ROUNDS):
        await expire()
    assert await come_back(before) == {}
    async with clique(2) as comms:
        await all_reduced(comms)


async def test_what_does_not_come_back_is_named(temper: str) -> None:
    """Stuck in the abort, in a call and in an init: counted while it lasts, and gone after."""
    await warm_up()
    before = pynccl.diagnostics()
    bound, pynccl._communicator.ABORT_BOUND = pynccl._communicator.ABORT_BOUND, 0.05
    try:
        comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1", "cpu:2"])
        with testing.faults("abort:stuck,rank=0;call:stuck,name=ncclAllReduce,rank=1"):
            stuck = comms[1].all_reduce(np.ones(4))
            await asyncio.sleep(0.02)
            begun = time.perf_counter()
            outcomes = await asyncio.gather(*(comm.abort() for comm in comms))
            assert outcomes == ["abandoned", "abandoned", "clean"]
            assert time.perf_counter() - begun < 0.5
            with pytest.raises(pynccl.AbortedError):
                await stuck
            now = pynccl.diagnostics()
            assert now["abandoned_communicators"] - before["abandoned_communicators"] == 2
            # The two helpers, and the lane that is inside the call.
            assert now["stuck_threads"] - before["stuck_threads"] == 3
            assert now["aborts_running"] - before["aborts_running"] == 2
        del stuck, comms
        assert await come_back({**resources(), **before}) == {}
    finally:
        pynccl._communicator.ABORT_BOUND = bound


async def test_an_abort_that_the_library_refuses_is_counted() -> None:
    """In a process of its own, since what it leaves is for good."""
    from processes import run

    ended = await asyncio.to_thread(
        run,
        """
async def main():
    comms = await made()
    inject("abort:fail=3")
    work = comms[0].all_reduce(np.ones(4))
    print([await comm.abort() for comm in comms], type(work.exception()).__name__)
    inject("")
    # The lanes are told to end, and do so by themselves.
    for _ in range(200):
        counts = pynccl.diagnostics()
        if not counts["lanes"]:
            break
        await asyncio.sleep(0.005)
    print(counts["abandoned_communicators"], counts["lanes"], counts["aborts_running"])
    async with (await made())[0] as again:
        print(again.state)
asyncio.run(main())
""",
        "-Wignore",
    )
    assert ended.output.startswith("['abandoned', 'abandoned'] AbortedError\n2 0 0\nready\n")
