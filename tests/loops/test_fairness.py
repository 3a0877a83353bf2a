"""Awaits of finished work, and completions by the thousand, leave the loop its turns."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from heartbeat import keeps_free
from running import alone, awaited, on_noop, ones
from support.loops import KINDS

import pynccl
from pynccl import testing

pytestmark = [pytest.mark.timing, pytest.mark.timeout(120)]
# In debug mode asyncio itself keeps the loop for 20 ms with a hundred new tasks or futures: it
# takes a traceback of each.
NOT_DEBUG = [kind for kind in KINDS if kind != "debug"]


async def test_awaits_of_finished_work(loop: str, long: bool) -> None:
    """Two million of them at full length; the 128th, or the one after 500 us, gives way."""
    rounds = 2_000_000 if long and loop == "plain" else 100_000

    async def part() -> None:
        for _ in range(rounds):
            await work

    async with on_noop() as comm:
        work = comm.all_reduce(ones())
        await keeps_free(part, f"{rounds} awaits of one finished operation")


async def test_operations_that_end_at_once(loop: str, long: bool) -> None:
    rounds = 500_000 if long and loop == "plain" else 50_000

    async def part() -> None:
        x = ones()
        for _ in range(rounds):
            await comm.all_reduce(x)

    async with on_noop() as comm:
        await keeps_free(part, f"{rounds} operations that end at once")


@pytest.mark.parametrize("loop", NOT_DEBUG, indirect=True)
async def test_many_tasks_that_await_finished_work(loop: str) -> None:
    """It is the loop's turn that must not be too long, however many tasks share it."""

    async def one(work: Any) -> None:
        for _ in range(200):
            await work
            burn(5e-6)

    async def part() -> None:
        await asyncio.gather(*(one(work) for _ in range(100)))

    async with on_noop() as comm:
        work = comm.all_reduce(ones())
        await keeps_free(part, "100 tasks that await finished work")


def burn(seconds: float) -> None:
    """What a task does with a result."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


async def test_bursts_are_long_again(loop: str) -> None:
    """The next turn of the loop begins with whole bursts, also on a loop that comes later."""
    turns = 0

    def count() -> None:
        nonlocal turns
        turns += 1
        ticking = loop_now.call_soon(count)
        handles[:] = [ticking]

    handles: list[Any] = []
    loop_now = asyncio.get_running_loop()
    async with on_noop() as comm:
        work = comm.all_reduce(ones())
        for _ in range(200):  # ends a burst
            await work
        handles.append(loop_now.call_soon(count))
        for _ in range(12800):
            await work
        handles[0].cancel()
    assert 90 < turns < 1000


@pytest.mark.parametrize("loop", NOT_DEBUG, indirect=True)
async def test_120_completions_at_once(loop: str, temper: str) -> None:
    """They arrive in one batch, and what is resolved by it runs from the loop's own queue."""

    async def part() -> None:
        with testing.faults("op:delay=150ms,call=1"):
            works = [comm.all_reduce(x) for x in xs]
            tasks = [asyncio.ensure_future(awaited(work)) for work in works]
            done = await asyncio.gather(*tasks)
        assert all(result is x for result, x in zip(done, xs, strict=True))

    xs = [ones() for _ in range(120)]
    async with alone() as comm:
        await keeps_free(part, "120 completions at once")


@pytest.mark.parametrize("loop", NOT_DEBUG, indirect=True)
async def test_waiting_for_many(loop: str, temper: str) -> None:
    async def part() -> None:
        with testing.faults("op:delay=100ms,call=1"):
            works = [comm.all_reduce(x) for x in xs]
            results = await pynccl.wait(*works, *works)
        assert len(results) == 2 * len(xs)

    xs = [ones() for _ in range(120)]
    async with alone() as comm:
        await keeps_free(part, "one wait for 240 works")
