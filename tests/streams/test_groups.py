"""Groups: whose they are, what they issue, and what they refuse."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import numpy as np
import pytest
from cliques import abort, arrays, clique

import pynccl
from pynccl import UsageError, testing
from pynccl.testing import Call, Journal

GROUP = ["ncclGroupStart", "ncclAllReduce", "ncclAllReduce", "ncclGroupEnd"]
"""The native calls of a group of two operations."""


def of_groups(journal: Journal) -> dict[int, list[Call]]:
    """The calls of groups and operations, by thread."""
    threads: dict[int, list[Call]] = {}
    for call in journal.named("ncclGroupStart", "ncclGroupEnd", "ncclAllReduce"):
        threads.setdefault(call.thread, []).append(call)
    return threads


def names(calls: list[Call]) -> list[str]:
    return [call.function for call in calls]


async def is_sound(comm: Any) -> None:
    """Nothing of a group that went wrong is left behind."""
    x = np.full(4, 3, np.float32)
    with testing.journal() as journal:
        await comm.all_reduce(x)
    assert journal.nccl() == ["ncclAllReduce"]
    assert journal.named("ncclAllReduce")[0].group_depth == 0
    assert x[0] == 3


class Fault(Exception):
    """What the user's code in a block raises."""


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2, 3])
async def test_an_exception_inside_issues_nothing(
    temper: str, loop: str, asynchronous: bool, position: int
) -> None:
    async with clique(1, warm=True) as comms:
        works: list[Any] = []

        def body() -> None:
            for step in range(3):
                if step == position:
                    raise Fault
                works.append(comms[0].all_reduce(np.ones(4)))
            raise Fault

        with testing.journal() as journal, pytest.raises(Fault):
            if asynchronous:
                async with pynccl.group():
                    body()
            else:
                with pynccl.group():
                    body()
        assert journal.nccl() == []
        assert len(works) == position
        for work in works:
            assert not work.done()
            with pytest.raises(UsageError, match="never issued"):
                await work
        await is_sound(comms[0])


async def test_a_wrong_operation_inside_issues_nothing(temper: str) -> None:
    async with clique(1, warm=True) as comms:
        with testing.journal() as journal, pytest.raises(pynccl.InvalidBufferError):
            async with pynccl.group():
                comms[0].all_reduce(np.ones(4))
                comms[0].all_reduce(np.ones((4, 4))[:, 1])
        assert journal.nccl() == []
        await is_sound(comms[0])


async def test_a_failed_communicator_inside_issues_nothing(temper: str) -> None:
    async with clique(1, warm=True) as comms:
        gone: list[Any] = await pynccl.create_all(["cpu:3"])
        with (
            testing.journal() as journal,
            pytest.raises(UsageError, match="ready"),
            pynccl.group(),
        ):
            comms[0].all_reduce(np.ones(4))
            gone[0].all_reduce(np.ones(4))
            await abort(gone)
        assert "ncclAllReduce" not in journal.nccl()
        await is_sound(comms[0])


@pytest.mark.parametrize("how", ["await", "future", "wait", "group"])
async def test_awaiting_inside_says_why_not(temper: str, loop: str, how: str) -> None:
    async with clique(1, warm=True) as comms:
        with pytest.raises(UsageError, match="still open|has ended") as raised:
            async with pynccl.group() as group:
                work = comms[0].all_reduce(np.ones(4))
                if how == "await":
                    await work
                elif how == "future":
                    await work.future()
                elif how == "wait":
                    await pynccl.wait(work)
                else:
                    await group
        assert "issued" in str(raised.value)
        await is_sound(comms[0])


async def test_others_issue_normally_meanwhile(temper: str, loop: str) -> None:
    """Child tasks, other tasks and other threads are no part of an open group."""
    async with clique(1, warm=True) as comms:
        comm = comms[0]

        async def issue() -> None:
            await comm.all_reduce(np.ones(4))

        async def other(ready: asyncio.Event, go: asyncio.Event) -> None:
            ready.set()
            await go.wait()
            await issue()

        ready, go = asyncio.Event(), asyncio.Event()
        earlier = asyncio.ensure_future(other(ready, go))
        await ready.wait()
        with testing.journal() as journal:
            async with pynccl.group():
                comm.all_reduce(np.ones(4))
                await asyncio.create_task(issue())
                go.set()
                await earlier
                await asyncio.to_thread(lambda: comm.all_reduce(np.ones(4)).wait(5))
                assert names(journal.named(*set(GROUP))) == ["ncclAllReduce"] * 3
                comm.all_reduce(np.ones(4))
        calls = journal.named(*set(GROUP))
        assert names(calls) == ["ncclAllReduce"] * 3 + GROUP
        assert [call.group_depth for call in calls[:3]] == [0] * 3


@pytest.mark.parametrize("eager", [False, *([True] if sys.version_info >= (3, 12) else [])])
async def test_a_child_that_starts_inside_has_its_own(temper: str, eager: bool) -> None:
    """An eager child runs on its parent's stack; the group in it is nevertheless its own."""
    async with clique(1, warm=True) as comms:
        if eager:
            factory: Any = getattr(asyncio, "eager_task_factory")  # noqa: B009 (Python 3.12)
            asyncio.get_running_loop().set_task_factory(factory)

        async def child() -> None:
            comms[0].all_reduce(np.ones(1))
            async with pynccl.group():
                comms[0].all_reduce(np.ones(2))
                comms[0].all_reduce(np.ones(3))

        with testing.journal() as journal:
            async with pynccl.group():
                comms[0].all_reduce(np.ones(4))
                await asyncio.create_task(child())
                comms[0].all_reduce(np.ones(5))
        counts = [call.count for call in journal.named("ncclAllReduce")]
        assert counts == [1, 2, 3, 4, 5]
        assert names(journal.named(*set(GROUP))) == ["ncclAllReduce", *GROUP, *GROUP]


async def test_two_tasks_in_turn_make_two_clean_groups(temper: str, loop: str) -> None:
    async with clique(1, warm=True) as comms:

        async def work(first: int) -> None:
            async with pynccl.group():
                for step in range(3):
                    comms[0].all_reduce(np.ones(first + step))
                    await asyncio.sleep(0)

        with testing.journal() as journal:
            await asyncio.gather(work(10), work(20))
        calls = journal.named(*set(GROUP))
        one = ["ncclGroupStart", *["ncclAllReduce"] * 3, "ncclGroupEnd"]
        assert names(calls) == one * 2
        counts = [call.count for call in calls if call.function == "ncclAllReduce"]
        assert counts in ([10, 11, 12, 20, 21, 22], [20, 21, 22, 10, 11, 12])


async def test_threads_have_their_own_groups(temper: str) -> None:
    async with clique(1, warm=True) as comms:
        barrier = threading.Barrier(2)

        def work(count: int) -> None:
            with pynccl.group() as group:
                barrier.wait(5)
                comms[0].all_reduce(np.ones(count))
                comms[0].all_reduce(np.ones(count))
                barrier.wait(5)
            for one in group.works:
                one.wait(5)

        with testing.journal() as journal:
            await asyncio.gather(asyncio.to_thread(work, 5), asyncio.to_thread(work, 7))
        for thread in of_groups(journal).values():
            names_of_it = names(thread)
            assert [names_of_it[i : i + 4] for i in range(0, len(names_of_it), 4)] == [
                GROUP
            ] * (len(names_of_it) // 4)
        counts = [call.count for call in journal.named("ncclAllReduce")]
        assert counts in ([5, 5, 7, 7], [7, 7, 5, 5])


async def test_nested_groups_join_in_every_form(temper: str) -> None:
    async with clique(1, warm=True) as comms:
        with testing.journal() as journal:
            async with pynccl.group() as outer:
                with pynccl.group() as first:
                    comms[0].all_reduce(np.ones(1))
                async with pynccl.group():
                    comms[0].all_reduce(np.ones(2))
                    with pynccl.group():
                        comms[0].all_reduce(np.ones(3))
        assert names(journal.named(*set(GROUP))) == [*GROUP[:3], *GROUP[1:2], *GROUP[3:]]
        assert len(outer.works) == 3
        with pytest.raises(UsageError, match="joined an outer one"):
            await first
        with testing.journal() as journal, pytest.raises(Fault):
            async with pynccl.group():
                comms[0].all_reduce(np.ones(1))
                with pynccl.group():
                    comms[0].all_reduce(np.ones(2))
                    raise Fault
        assert journal.nccl() == []


async def test_a_group_over_the_ranks_of_one_process(temper: str, loop: str) -> None:
    """All ranks in one native group: none waits for the other."""
    async with clique(4) as comms:
        xs = arrays(comms)
        async with pynccl.group() as group:
            for comm, x in zip(comms, xs, strict=True):
                comm.all_reduce(x)
        assert [x.tolist() for x in xs] == [[10.0] * 4] * 4
        assert all(work.done() for work in group.works)


async def test_a_group_over_several_communicators(temper: str) -> None:
    """On devices of their own: on one device they could wait for each other, as on a GPU."""
    async with clique(2) as firsts:
        seconds: list[Any] = await pynccl.create_all(["cpu:2", "cpu:3"])
        xs, ys = arrays(firsts), arrays(seconds, 8)
        async with pynccl.group():
            for rank in range(2):
                firsts[rank].all_reduce(xs[rank])
                seconds[1 - rank].all_reduce(ys[1 - rank], op="max")
        assert [x.tolist() for x in xs] == [[3.0] * 4] * 2
        assert [y.tolist() for y in ys] == [[2.0] * 8] * 2
        await asyncio.gather(*(comm.close() for comm in seconds))


async def test_an_exchange_of_messages_in_one_group(temper: str) -> None:
    """Each rank sends to and receives from all others, in any order."""
    async with clique(3) as comms:
        got = [np.zeros((3, 2), np.float32) for _ in comms]
        async with pynccl.group():
            for comm in comms:
                for peer in range(3):
                    if peer == comm.rank:
                        continue
                    comm.recv(got[comm.rank][peer], peer)
                    comm.send(np.full(2, 10 * comm.rank + peer, np.float32), peer)
        for rank, rows in enumerate(got):
            for peer in range(3):
                expected = 0 if peer == rank else 10 * peer + rank
                assert rows[peer].tolist() == [expected] * 2


async def test_a_group_serves_once(temper: str) -> None:
    async with clique(1, warm=True) as comms:
        with pynccl.group() as group:
            comms[0].all_reduce(np.ones(4))
        assert len(await group) == 1
        assert len(await group) == 1
        with pytest.raises(UsageError, match="once"), group:
            pass


@pytest.mark.parametrize("bad", [[1], (2,), 3, None], ids=repr)
async def test_wait_takes_works_and_says_so(bad: object) -> None:
    async with clique(1) as comms:
        work = comms[0].all_reduce(np.ones(4))
        with pytest.raises(UsageError, match=f"takes Works.*not a {type(bad).__name__}"):
            await pynccl.wait(work, bad)
        with pytest.raises(UsageError, match=r"wait\(\*works\); not a list"):
            await pynccl.wait([work])
        assert await pynccl.wait(work) == [await work]
