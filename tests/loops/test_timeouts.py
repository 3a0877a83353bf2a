"""A time-out ends a wait at its time, never at the operation's end, and swallows no result."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from running import alone, awaited, ones, pair

import pynccl
from pynccl import testing

pytestmark = [pytest.mark.timing, pytest.mark.usefixtures("temper")]
SLOW = "op:delay=400ms"
LIMIT = 0.1
NEEDS_311 = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="asyncio.timeout and TaskGroup wait for Python 3.11"
)


@contextlib.asynccontextmanager
async def slow(ranks: int = 1) -> AsyncIterator[tuple[list[Any], list[Any]]]:
    """An operation under way on each rank that takes 400 ms: the works, and their arrays."""
    async with alone() if ranks == 1 else pair() as made:
        comms = [made] if ranks == 1 else made
        xs = [ones() for _ in comms]
        with testing.faults(SLOW):
            works = [comm.all_reduce(x) for comm, x in zip(comms, xs, strict=True)]
            yield works, xs
            assert await pynccl.wait(*works) is not None
        assert {comm.state for comm in comms} == {"ready"}


@contextlib.contextmanager
def takes(seconds: float) -> Any:
    """The block takes so long, and not 60 ms more."""
    start = time.monotonic()
    yield
    spent = time.monotonic() - start
    assert seconds - 0.005 <= spent < seconds + 0.06, f"{spent:.3f} s instead of {seconds} s"


@NEEDS_311
@pytest.mark.parametrize("ranks", [1, 2])
async def test_timeout(loop: str, ranks: int) -> None:
    async with slow(ranks) as (works, xs):
        with takes(LIMIT), pytest.raises(TimeoutError):
            async with asyncio.timeout(LIMIT):
                await works[0]
        assert not works[0].done()
        async with asyncio.timeout(5):
            assert await works[0] is xs[0]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_wait_for(loop: str, ranks: int) -> None:
    async with slow(ranks) as (works, xs):
        with takes(LIMIT), pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(awaited(works[0]), LIMIT)
        with takes(LIMIT), pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(works[0].future(), LIMIT)
        assert not works[0].done()
        assert await asyncio.wait_for(works[0].future(), 5) is xs[0]


async def test_wait_for_over_several(loop: str) -> None:
    async with slow(2) as (works, xs):
        with takes(LIMIT), pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pynccl.wait(*works), LIMIT)
        results = await pynccl.wait(*works)
        assert all(r is x for r, x in zip(results, xs, strict=True))


async def test_a_result_that_comes_with_the_timeout(loop: str) -> None:
    """At the very moment of the time-out: either the result or the time-out, and no third."""
    async with alone() as comm:
        outcomes = {"result": 0, "timeout": 0}
        with testing.faults("op:delay=4ms"):
            for i in range(60):
                x = ones()
                work = comm.all_reduce(x)
                try:
                    assert await asyncio.wait_for(awaited(work), 0.0035 + i * 2e-5) is x
                    outcomes["result"] += 1
                except asyncio.TimeoutError:
                    outcomes["timeout"] += 1
                assert await work is x
        assert sum(outcomes.values()) == 60


async def test_gather(loop: str) -> None:
    async with slow(2) as (works, xs):
        results = await asyncio.gather(awaited(works[0]), works[1].future())
        assert all(r is x for r, x in zip(results, xs, strict=True))


async def test_gather_that_is_cancelled(loop: str) -> None:
    async with slow(2) as (works, xs):
        together = asyncio.gather(*(work.future() for work in works))
        with takes(LIMIT), pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(together, LIMIT)
        assert not any(work.done() for work in works)
        assert await works[1] is xs[1]


async def test_shield(loop: str) -> None:
    async with slow() as (works, xs):
        inner = asyncio.ensure_future(awaited(works[0]))
        with takes(LIMIT), pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(inner), LIMIT)
        assert not inner.done()
        assert await inner is xs[0]


async def test_wait(loop: str) -> None:
    async with slow(2) as (works, xs):
        futures = [work.future() for work in works]
        with takes(LIMIT):
            done, pending = await asyncio.wait(futures, timeout=LIMIT)
        assert (len(done), len(pending)) == (0, 2)
        done, pending = await asyncio.wait(futures)
        assert (len(done), len(pending)) == (2, 0)
        assert {id(future.result()) for future in done} == {id(x) for x in xs}


async def test_as_completed(loop: str) -> None:
    async with alone("cpu:0") as first, alone("cpu:1") as second:
        slow_x, quick_x = ones(), ones()
        with testing.faults("op:delay=300ms,times=1;op:delay=20ms"):
            slow_work = first.all_reduce(slow_x)
            await asyncio.sleep(0.02)  # its kernel has met the first rule
            quick_work = second.all_reduce(quick_x)
            order = []
            for future in asyncio.as_completed([slow_work.future(), quick_work.future()]):
                order.append(await future)
        assert order[0] is quick_x
        assert order[1] is slow_x


async def test_as_completed_with_a_timeout(loop: str) -> None:
    async with slow() as (works, _):
        first = next(iter(asyncio.as_completed([works[0].future()], timeout=LIMIT)))
        with takes(LIMIT), pytest.raises(asyncio.TimeoutError):
            await first


@NEEDS_311
async def test_task_group(loop: str) -> None:
    async with slow(2) as (works, xs):
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(awaited(work)) for work in works]
        assert all(task.result() is x for task, x in zip(made, xs, strict=True))


@NEEDS_311
async def test_task_group_within_a_timeout(loop: str) -> None:
    async def group() -> None:
        async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(awaited(work))

    async with slow(2) as (works, _):
        with takes(LIMIT), pytest.raises(TimeoutError):
            await group()
        assert not any(work.done() for work in works)


async def test_a_timeout_around_finished_work(loop: str) -> None:
    """Awaits that never suspend reach the loop now and then, so that its time-outs fire."""

    async def for_ever() -> None:
        while True:
            await work

    async with alone() as comm:
        work = comm.all_reduce(np.ones(2, np.float32))
        await work
        with takes(LIMIT), pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(for_ever(), LIMIT)


async def test_a_timeout_while_operations_go_on(loop: str) -> None:
    async def for_ever() -> None:
        while True:
            await comm.all_reduce(x)

    async with alone() as comm:
        x = ones()
        with takes(LIMIT), pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(for_ever(), LIMIT)
