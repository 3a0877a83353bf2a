"""Called means issued, and nothing of it waits for the device."""

from __future__ import annotations

import statistics
import time
from functools import partial

import numpy as np
import pytest
from cliques import all_reduced, arrays, clique, reduce_all
from foreign_stream import ForeignStream

import pynccl
from pynccl import testing

DELAY_S = 0.1
ROUNDS = 5


def note_the_time(times: list[int]) -> None:
    times.append(time.perf_counter_ns())


@pytest.mark.timing
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_call_returns_at_once_and_an_await_when_it_is_done(
    temper: str, ranks: int
) -> None:
    """With a delay in the engine: what is issued is not done, and has touched no output."""
    issuing, returning = [], []
    async with clique(ranks, warm=True) as comms:
        with ForeignStream() as stream, testing.faults(f"op:delay={DELAY_S}s"):
            for _ in range(ROUNDS):
                xs, outs = arrays(comms), [np.zeros(4, np.float32) for _ in comms]
                ended: list[int] = []
                works = []
                for comm, x, out in zip(comms, xs, outs, strict=True):
                    start = time.perf_counter_ns()
                    used = stream if comm is comms[0] else None
                    works.append(comm.all_reduce(x, out=out, stream=used))
                    issuing.append(time.perf_counter_ns() - start)
                issued = time.perf_counter_ns()
                stream.launch(partial(note_the_time, ended))
                assert not any(work.done() for work in works)
                assert not np.any(outs)
                result = await works[0]
                returned = time.perf_counter_ns()
                assert result is outs[0]
                assert result.tolist() == [sum(range(1, ranks + 1))] * 4
                assert returned - issued >= DELAY_S * 0.9e9
                await pynccl.wait(*works)
                stream.synchronize()
                returning.append(returned - ended[0])
    assert statistics.median(issuing) < 1e6, issuing
    # The function runs behind the operation, so it was told the end late if at all.
    assert min(returning) < 1e6, returning


@pytest.mark.timing
async def test_nothing_waits_for_a_peer(temper: str) -> None:
    """First contact blocks a native call until the peer comes, and no call of ours."""
    async with clique(2) as comms:
        xs = arrays(comms)
        start = time.perf_counter()
        first = comms[0].all_reduce(xs[0])
        assert time.perf_counter() - start < 0.05
        assert not first.done()
        second = comms[1].all_reduce(xs[1])
        await first
        await second
        assert xs[0].tolist() == xs[1].tolist() == [3.0] * 4


async def test_operations_run_in_call_order(temper: str) -> None:
    async with clique(2, warm=True) as comms:
        x = [np.full(1, comm.rank + 1.0) for comm in comms]
        works = [
            comm.all_reduce(x[comm.rank], op=op)
            for op in ("sum", "prod", "sum")
            for comm in comms
        ]
        first = comms[0].issued - 2
        assert [work.seq - first for work in works] == [0, 0, 1, 1, 2, 2]
        await works[-1]
        await works[-2]
        assert all(work.done() for work in works)
        assert [float(a[0]) for a in x] == [18.0, 18.0]


async def test_a_group_is_one_native_group(temper: str) -> None:
    count = 5
    async with clique(2, warm=True) as comms:
        xs = [arrays(comms) for _ in range(count)]
        with testing.journal() as journal:
            async with pynccl.group():
                for some in xs:
                    reduce_all(comms, some)
                assert journal.nccl() == []
            names = journal.nccl()
        assert names == ["ncclGroupStart", *["ncclAllReduce"] * 2 * count, "ncclGroupEnd"]
        assert {call.group_depth for call in journal.named("ncclAllReduce")} == {1}
        ends = journal.named("ncclGroupStart", "ncclGroupEnd")
        assert ends[0].thread == ends[1].thread
        for some in xs:
            assert all(x.tolist() == [3.0] * 4 for x in some)


async def test_a_single_call_opens_no_group(temper: str) -> None:
    async with clique(1, warm=True) as comms:
        with testing.journal() as journal:
            await all_reduced(comms)
        assert journal.nccl() == ["ncclAllReduce"]


async def test_nested_groups_join_the_outermost(temper: str) -> None:
    async with clique(2, warm=True) as comms:
        xs, ys = arrays(comms), arrays(comms)
        with testing.journal() as journal:
            async with pynccl.group() as outer:
                reduce_all(comms, xs)
                async with pynccl.group() as inner:
                    reduce_all(comms, ys)
                assert journal.nccl() == []
            assert journal.nccl().count("ncclGroupStart") == 1
        assert len(outer.works) == 4
        with pytest.raises(pynccl.UsageError, match="outer"):
            await inner
        assert [x.tolist() for x in (*xs, *ys)] == [[3.0] * 4] * 4


async def test_an_empty_group_calls_nothing(temper: str) -> None:
    async with clique(1):
        with testing.journal() as journal:
            async with pynccl.group():
                pass
        assert journal.nccl() == []


@pytest.mark.parametrize("grouped", [True, False], ids=["in a group", "one by one"])
async def test_a_ring_of_messages_needs_a_group(temper: str, grouped: bool) -> None:
    """As with NCCL: sends that all come first wait for receives that nobody reaches.

    Between processes or threads that is so outright; with all ranks on one loop the sends must
    be awaited before the receives are called.
    """
    with testing.settings(mode="faithful"):
        async with clique(3, timeout=10) as comms:
            inbox = [np.zeros(1 << 18, np.float32) for _ in comms]
            outbox = [np.full(1 << 18, comm.rank + 1, np.float32) for comm in comms]
            if grouped:
                async with pynccl.group():
                    for comm in comms:
                        comm.send(outbox[comm.rank], (comm.rank + 1) % 3)
                        comm.recv(inbox[comm.rank], (comm.rank - 1) % 3)
                assert [box[-1] for box in inbox] == [3.0, 1.0, 2.0]
            else:
                sends = [
                    comm.send(outbox[comm.rank], (comm.rank + 1) % 3, timeout=0.2)
                    for comm in comms
                ]
                for send in sends:
                    with pytest.raises(pynccl.DeadlineError, match="send"):
                        await send
                assert {comm.state for comm in comms} == {"failed"}
    async with clique(3) as comms:
        await all_reduced(comms)


async def test_operations_are_numbered_from_one(temper):
    """As NCCL's own log and the host engine number them; management calls do not count."""
    async with clique(2) as comms:
        works = [comm.all_reduce(np.ones(3, np.float32)) for comm in comms]
        assert [work.seq for work in works] == [1, 1]
        assert [comm.issued for comm in comms] == [1, 1]
        await pynccl.wait(*works)
