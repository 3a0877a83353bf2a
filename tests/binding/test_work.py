"""Work: awaitable any number of times, by anybody, and never undone by who stops waiting."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from cliques import all_reduced, arrays, clique, reduce_all
from support.loops import run_on

import pynccl
from pynccl import testing

pytestmark = pytest.mark.usefixtures("temper")
SLOW = "op:delay=60ms"


@pytest.fixture(params=[1, 2], ids=["inline", "lanes"])
def ranks(request: pytest.FixtureRequest) -> int:
    """One rank issues inline, two in a process through their lanes."""
    count: int = request.param
    return count


async def test_awaited_twice(loop: str, ranks: int) -> None:
    async with clique(ranks, warm=True) as comms:
        xs = arrays(comms)
        with testing.faults(SLOW):
            works = reduce_all(comms, xs)
            assert await works[0] is xs[0]
            assert await works[0] is xs[0]
            assert works[0].result() is works[0].out is xs[0]
            assert works[0].exception() is None
            await pynccl.wait(*works)


async def test_awaited_by_several_tasks(loop: str, ranks: int) -> None:
    async def waits(work: Any) -> Any:
        return await work

    async with clique(ranks, warm=True) as comms:
        xs = arrays(comms)
        with testing.faults(SLOW):
            works = reduce_all(comms, xs)
            tasks = [asyncio.ensure_future(waits(works[0])) for _ in range(10)]
            results = await asyncio.gather(*tasks)
        assert all(result is xs[0] for result in results)
        await pynccl.wait(*works)


async def test_awaited_on_two_loops(loop: str, ranks: int) -> None:
    """Each loop is woken by its own eventfd, on its own thread."""
    async with clique(ranks, warm=True) as comms:
        xs = arrays(comms)
        with testing.faults(SLOW):
            works = reduce_all(comms, xs)
            seen: list[Any] = []

            def elsewhere() -> None:
                async def main() -> None:
                    seen.append(await works[0])
                    seen.append(threading.get_ident())

                asyncio.run(main())

            thread = threading.Thread(target=elsewhere)
            thread.start()
            result = await works[0]
            await asyncio.to_thread(thread.join, 5)
            assert seen[0] is result is xs[0]
            assert seen[1] != threading.get_ident()
            await pynccl.wait(*works)


async def test_future(loop: str, ranks: int) -> None:
    async with clique(ranks, warm=True) as comms:
        xs = arrays(comms)
        with testing.faults(SLOW):
            works = reduce_all(comms, xs)
            pending = works[0].future()
            assert isinstance(pending, asyncio.Future)
            assert not pending.done()
            dropped = works[0].future()
            dropped.cancel()
            del dropped
            done, _ = await asyncio.wait({pending, *(w.future() for w in works)})
            assert len(done) == 1 + ranks
        assert pending.result() is xs[0]
        assert works[0].future().done()


async def test_gather_takes_works(loop: str, ranks: int) -> None:
    async with clique(ranks, warm=True) as comms:
        xs = arrays(comms)
        with testing.faults(SLOW):
            results = await asyncio.gather(*(work.future() for work in reduce_all(comms, xs)))
        assert all(result is x for result, x in zip(results, xs, strict=True))
        xs = arrays(comms)
        results = await pynccl.wait(*reduce_all(comms, xs))
        assert all(result is x for result, x in zip(results, xs, strict=True))
        assert await pynccl.wait() == []


async def awaited(work: Any) -> Any:
    return await work


async def test_a_timeout_ends_the_wait_only(loop: str, ranks: int) -> None:
    async with clique(ranks, warm=True) as comms:
        xs = arrays(comms)
        with testing.faults(SLOW):
            works = reduce_all(comms, xs)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(awaited(works[0]), 0.005)
            assert not works[0].done()
            if sys.version_info >= (3, 11):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.005):
                        await works[0]
            assert await works[0] is xs[0]
            await pynccl.wait(*works)
        assert {comm.state for comm in comms} == {"ready"}
        assert xs[0].tolist() == [sum(range(1, ranks + 1))] * 4


async def test_a_cancelled_task_undoes_nothing(loop: str, ranks: int) -> None:
    async with clique(ranks, warm=True) as comms:
        xs = arrays(comms)
        with testing.faults(SLOW):
            works = reduce_all(comms, xs)
            task = asyncio.ensure_future(awaited(works[0]))
            other = asyncio.ensure_future(awaited(works[0]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await other is xs[0]
            await pynccl.wait(*works)
        await all_reduced(comms)


async def test_many_cancelled_waits_leave_nothing(loop: str, ranks: int) -> None:
    """A loop of time-outs around one operation does not pile up futures behind it."""
    async with clique(ranks, warm=True) as comms:
        xs = arrays(comms)
        with testing.faults(SLOW):
            works = reduce_all(comms, xs)
            refs = []
            for _ in range(50):
                future = works[0].future()
                refs.append(weakref.ref(future))
                future.cancel()
                del future
                await asyncio.sleep(0)
            works[0].future()
            assert sum(ref() is not None for ref in refs) <= 2
            await pynccl.wait(*works)


@pytest.mark.parametrize("where", ["finished", "pending"])
async def test_a_dropped_work_is_carried_out(loop: str, ranks: int, where: str) -> None:
    async with clique(ranks, warm=True) as comms:
        xs = arrays(comms)
        with testing.faults(SLOW if where == "pending" else ""):
            for work in reduce_all(comms, xs):
                del work
            await asyncio.sleep(0.15 if where == "pending" else 0.03)
        assert all(x.tolist() == [sum(range(1, ranks + 1))] * 4 for x in xs)
    assert all(comm.issued >= 2 for comm in comms)


@pytest.mark.parametrize("heir", ["another loop", "no loop"])
def test_a_loop_that_is_closed_before_the_end(loop: str, ranks: int, heir: str) -> None:
    """The buffers live on, another loop gets the result, and the dead one is forgotten."""
    kept: dict[str, Any] = {}
    loops = pynccl.diagnostics()["event_loops"]

    async def first() -> None:
        comms = await pynccl.create_all([f"cpu:{i}" for i in range(ranks)])
        await all_reduced(comms)
        kept.update(comms=comms, xs=arrays(comms))
        kept["works"] = reduce_all(comms, kept["xs"])
        task = asyncio.ensure_future(awaited(kept["works"][0]))
        await asyncio.sleep(0.005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def second() -> None:
        await pynccl.wait(*kept["works"])

    with testing.faults("op:delay=60ms"):
        run_on(loop, first())
    if heir == "another loop":
        run_on(loop, second())
    else:
        for work in kept["works"]:
            work.wait()
    end = time.monotonic() + 0.1  # what nobody drains is drained by the reaper
    while pynccl.diagnostics()["event_loops"] > loops and time.monotonic() < end:
        time.sleep(0.002)
    assert pynccl.diagnostics()["event_loops"] <= loops
    assert all(x.tolist() == [sum(range(1, ranks + 1))] * 4 for x in kept["xs"])
    asyncio.run(closed(kept["comms"]))


if sys.version_info >= (3, 11):

    async def test_a_task_group(loop: str, ranks: int) -> None:
        async with clique(ranks, warm=True) as comms:
            xs = arrays(comms)
            async with asyncio.TaskGroup() as tasks:
                for work in reduce_all(comms, xs):
                    tasks.create_task(awaited(work))
            assert xs[0].tolist() == [sum(range(1, ranks + 1))] * 4
            with testing.faults(SLOW):
                works = reduce_all(comms, xs)
                with pytest.raises(ExceptionGroup) as raised:  # noqa: F821 (3.11; a block)
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(awaited(works[0]))
                        tasks.create_task(fails())
                assert isinstance(raised.value.exceptions[0], ZeroDivisionError)
                await pynccl.wait(*works)  # a wait was cancelled, no operation


async def fails() -> None:
    await asyncio.sleep(0.001)
    1 / 0  # noqa: B018 (it is the division that fails)


async def test_finished_work_does_not_starve_the_loop(loop: str, ranks: int) -> None:
    """Awaits that need not suspend give the loop its turn now and then."""
    async with clique(ranks, warm=True) as comms:
        work = reduce_all(comms, arrays(comms))[0]
        await asyncio.sleep(0.02)
        assert work.done()
        turns = 0
        running = True

        async def counts_turns() -> None:
            nonlocal turns
            while running:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(counts_turns())
        for _ in range(2000):
            await work
        running = False
        await task
        assert turns >= 2000 / 128 - 1


# ---- without a loop --------------------------------------------------------------------------


def made(ranks: int) -> list[pynccl.Communicator]:
    return asyncio.run(pynccl.create_all([f"cpu:{i}" for i in range(ranks)]))


async def closed(comms: list[pynccl.Communicator]) -> None:
    await asyncio.gather(*(comm.close() for comm in comms))


@pytest.mark.timing
def test_wait_without_a_loop(ranks: int) -> None:
    comms = made(ranks)
    xs = arrays(comms)
    with testing.faults(SLOW):
        works = reduce_all(comms, xs)
        start = time.perf_counter()
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.005 s"):
            works[0].wait(0.005)
        assert time.perf_counter() - start < 0.05
        assert works[0].wait() is xs[0]
        assert all(work.wait(5) is x for work, x in zip(works, xs, strict=True))
        with pytest.raises(pynccl.UsageError, match="needs a running event loop"):
            works[0].future()
    assert xs[0].tolist() == [sum(range(1, ranks + 1))] * 4
    asyncio.run(closed(comms))


def test_a_group_without_a_loop(ranks: int) -> None:
    comms = made(ranks)
    xs = arrays(comms)
    with pynccl.group() as group:
        reduce_all(comms, xs)
    for work in group.works:
        work.wait()
    assert xs[0].tolist() == [sum(range(1, ranks + 1))] * 4
    asyncio.run(closed(comms))


async def test_what_a_work_says_of_itself(ranks: int) -> None:
    async with clique(ranks, warm=True) as comms:
        with testing.faults(SLOW):
            works = [comm.all_reduce(np.zeros(6)) for comm in comms]
            assert f"rank 0 of {ranks}" in repr(works[0])
            assert "all_reduce" in repr(works[0])
            assert "48 bytes of float64" in repr(works[0])
            assert "pending" in repr(works[0])
            assert (works[0].nbytes, works[0].seq) == (48, comms[0].issued)
            await pynccl.wait(*works)
            assert "done" in repr(works[0])
