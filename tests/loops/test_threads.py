"""Three loops in three threads: every await ends once, wherever the operation was issued."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from running import awaited, ones

import pynccl
from pynccl import testing

THREADS = 3
pytestmark = pytest.mark.timeout(120)


def in_threads(main: Callable[[int], Coroutine[Any, Any, Any]], kind: str) -> list[Any]:
    """Run a coroutine on a loop of its own in each of three threads; its results."""
    results: list[Any] = [None] * THREADS
    errors: list[BaseException] = []

    def one(index: int) -> None:
        try:
            if kind == "uvloop":
                import uvloop

                results[index] = uvloop.run(main(index))
            else:
                results[index] = asyncio.run(main(index))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(800)
    assert not any(thread.is_alive() for thread in threads), "a loop never ended"
    if errors:
        raise errors[0]
    return results


async def lone(device: int) -> Any:
    unique_id = await pynccl.unique_id("cpu")
    return await pynccl.Communicator.create(1, 0, unique_id, device=f"cpu:{device}")


@pytest.mark.parametrize("kind", ["plain", "uvloop"])
def test_none_is_lost_and_none_comes_twice(kind: str, temper: str, long: bool) -> None:
    """A million at full length. Each thread has a communicator, and all share one more."""
    each = (1_000_000 if long and kind == "plain" and temper == "quick" else 100_000) // THREADS
    if temper == "gpulike":
        each //= 5  # a launch costs 5 us there
    shared = asyncio.run(lone(7))
    complaints: list[dict[str, Any]] = []

    async def main(index: int) -> dict[str, int]:
        asyncio.get_running_loop().set_exception_handler(lambda _, c: complaints.append(c))
        own = await lone(index)
        seen = {"awaited": 0, "futures": 0, "called back": 0}

        def called_back(_: Any) -> None:
            seen["called back"] += 1

        done = 0
        while done < each:
            comm = own if done % 200 else shared
            xs = [np.full(2, done + i, np.int64) for i in range(50)]
            works = [comm.all_reduce(x) for x in xs]
            future = works[-1].future()
            future.add_done_callback(called_back)
            seen["futures"] += 1
            if done % 400 == 0:  # all suspended at once; else one after another
                results = await asyncio.gather(*(awaited(work) for work in works))
            else:
                results = [await work for work in works]
            assert all(result is x for result, x in zip(results, xs, strict=True))
            assert [int(x[0]) for x in xs] == list(range(done, done + 50))
            assert await future is xs[-1]
            done += 50
            seen["awaited"] += 50
        await asyncio.sleep(0)
        await own.close()
        return seen

    with testing.faults("op:delay=50us,every=20"):
        totals = in_threads(main, kind)
    asyncio.run(close(shared))
    for seen in totals:
        assert seen["awaited"] >= each
        assert seen["futures"] == seen["called back"] == seen["awaited"] // 50
    assert complaints == []


async def close(comm: Any) -> None:
    await comm.close()


@pytest.mark.parametrize("kind", ["plain", "uvloop"])
@pytest.mark.parametrize("delay", ["0us", "200us", "20ms"])
def test_one_work_awaited_from_three_loops(kind: str, delay: str, temper: str) -> None:
    """Each thread issues, and all three await everything."""
    rounds = 5 if delay == "20ms" else 40
    gate = threading.Barrier(THREADS)
    works: list[Any] = [None] * THREADS

    async def main(index: int) -> int:
        comm = await lone(index)
        seen = 0
        for number in range(rounds):
            x = np.full(3, number, np.float32)
            works[index] = comm.all_reduce(x)
            await asyncio.to_thread(gate.wait, 30)
            # Two tasks a loop, so that each mailbox holds one wait for two futures.
            results = await asyncio.gather(
                *(awaited(work) for work in works), *(awaited(work) for work in works)
            )
            assert all(r is w.out for r, w in zip(results, works * 2, strict=True))
            seen += len(results)
            await asyncio.to_thread(gate.wait, 30)
        await comm.close()
        return seen

    with testing.faults(f"op:delay={delay}" if delay != "0us" else ""):
        assert in_threads(main, kind) == [rounds * THREADS * 2] * THREADS


def test_a_loop_that_goes_while_others_wait(temper: str) -> None:
    """One of three loops is closed with a wait pending; the others get theirs."""
    held: dict[str, Any] = {}
    gate = threading.Barrier(THREADS)

    async def main(index: int) -> bool:
        if index == 0:
            held["comm"] = await lone(0)
            held["x"] = ones()
            held["work"] = held["comm"].all_reduce(held["x"])
        await asyncio.to_thread(gate.wait, 30)
        waiting = asyncio.ensure_future(awaited(held["work"]))
        await asyncio.sleep(0.01)
        if index == 1:
            return waiting.done()  # run() cancels it, and closes the loop
        return await waiting is held["x"]

    with testing.faults("op:delay=300ms"):
        assert in_threads(main, "plain") == [True, False, True]
    asyncio.run(close(held["comm"]))
