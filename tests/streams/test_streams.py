"""Streams and events as users hold them: ours, and those of others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from cliques import abort, all_reduced, arrays, clique, reduce_all
from foreign_stream import ForeignStream

import pynccl
from pynccl import ConfigError, DeadlineError, Event, Stream, UsageError, testing


@contextlib.asynccontextmanager
async def busy(seconds: float) -> AsyncIterator[tuple[Stream, Callable[[], Any]]]:
    """A stream on which an operation runs for so long, and a way to put another behind it."""
    async with clique(1, warm=True) as comms:
        stream = Stream("cpu:0")
        x = np.ones(4, np.float32)

        def more() -> Any:
            return comms[0].all_reduce(x, stream=stream)

        with testing.faults(f"op:delay={round(seconds * 1000)}ms"):
            more()
            yield stream, more


async def test_a_stream_is_idle_until_something_is_on_it(temper: str, loop: str) -> None:
    stream = Stream("cpu:0")
    assert stream.query()
    await stream
    assert stream.__cuda_stream__() == (0, stream.handle)
    with testing.faults("op:delay=50ms"):
        async with clique(2) as comms:
            xs = arrays(comms)
            begun = time.perf_counter()
            works = [comms[0].all_reduce(xs[0], stream=stream), comms[1].all_reduce(xs[1])]
            assert not stream.query()
            await stream
            assert time.perf_counter() - begun >= 0.045
            assert stream.query()
            assert works[0].done()
            await pynccl.wait(*works)


@pytest.mark.timing
async def test_awaiting_waits_for_what_is_on_it_now(temper: str) -> None:
    async with busy(0.1) as (stream, more):
        begun = time.perf_counter()
        now = stream.done()
        later = more()  # no part of it
        await now
        assert 0.09 <= time.perf_counter() - begun < 0.18
        await later


@pytest.mark.parametrize("spelled", ["protocol", "handle"])
async def test_streams_of_others(temper: str, spelled: str) -> None:
    async with busy(0.05) as (other, more):
        stream = Stream.of(other if spelled == "protocol" else other.handle, "cpu:0")
        assert stream.handle == other.handle
        assert not stream.query()
        await stream
        assert stream.query()
        with testing.journal() as journal:
            del stream
            gc.collect()
        assert journal.named("cuStreamDestroy_v2") == []
        await more()  # it is still theirs, and alive


async def test_priorities(temper: str) -> None:
    await Stream("cpu:0", priority=0)
    with pytest.raises(ConfigError, match="priority"):
        Stream("cpu:0", priority=-1000)
    with testing.journal() as journal:
        stream = Stream("cpu:0", priority=-1)
    assert [call.function for call in journal.named("cuStreamCreateWithPriority")]
    await stream


async def test_events(temper: str, loop: str) -> None:
    async with busy(0.05) as (stream, _):
        event = Event("cpu:0")
        assert event.query()  # nothing recorded
        begun = time.perf_counter()
        event.record(stream)
        assert not event.query()
        await event
        assert time.perf_counter() - begun >= 0.03
        assert event.query()
        await event  # as often as one likes
        await asyncio.gather(*(event.done().future() for _ in range(3)))


async def test_an_event_is_a_point_that_moves(temper: str) -> None:
    """Recorded again it stands for the later point, for waits that come then."""
    async with busy(0.06) as (stream, more):
        begun = time.perf_counter()
        event = stream.record()
        more()
        event.record(stream)
        await event
        assert time.perf_counter() - begun >= 0.1


async def test_times(temper: str) -> None:
    async with busy(0.01) as (stream, more):
        first, last = Event("cpu:0", timing=True), Event("cpu:0", timing=True)
        await stream
        first.record(stream)
        for _ in range(5):
            more()
        last.record(stream)
        await last
    assert 0.045 <= last.elapsed(first) < 1
    with pytest.raises(UsageError, match="timing=True"):
        last.elapsed(Event("cpu:0"))


@pytest.mark.timing
async def test_timed_operations(temper: str) -> None:
    """On the device, not from the call: what it waited for behind others does not count."""
    async with clique(2) as comms:
        await all_reduced(comms)
        xs = arrays(comms)
        with testing.faults("op:delay=60ms"):
            first = reduce_all(comms, xs)
            begun = time.perf_counter()
            timed = reduce_all(comms, xs, timed=True)
            for work in timed:
                with pytest.raises(UsageError, match="not ended"):
                    _ = work.duration
            await pynccl.wait(*first, *timed)
            took = time.perf_counter() - begun
        for work in timed:
            assert 0.055 <= work.duration < took - 0.03
        with pytest.raises(UsageError, match="timed=True"):
            _ = first[0].duration


async def test_a_stream_of_another_device_is_refused_by_name(temper: str) -> None:
    stream = Stream("cpu:1")
    async with clique(1) as comms:
        for spelled in (stream, Stream.of(stream.handle, "cpu:1")):
            with pytest.raises(UsageError, match="is on cpu:1, this communicator is on cpu:0"):
                comms[0].all_reduce(np.ones(4), stream=spelled)
        with pytest.raises(
            UsageError, match=r"Stream.*device 1.*another device than.*device 0"
        ):
            Event("cpu:0").record(stream)
        await comms[0].all_reduce(np.ones(4), stream=Stream("cpu:0"))


# ---- order without a host wait ---------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize("ranks", [1, 2], ids=["inline", "lanes"])
@pytest.mark.parametrize("spelled", ["order", "wait"])
async def test_a_stream_waits_for_a_work(temper: str, ranks: int, spelled: str) -> None:
    async with clique(ranks, warm=True) as comms:
        xs, seen = arrays(comms), []
        with ForeignStream() as other, testing.faults("op:delay=30ms"):
            works = reduce_all(comms, xs)
            begun = time.perf_counter()
            if spelled == "order":
                works[0].order(Stream.of(other, "cpu:0"))
            else:
                Stream.of(other, "cpu:0").wait(works[0])
            assert time.perf_counter() - begun < 0.02  # the host does not wait
            ran = other.launch(lambda: seen.append(xs[0].tolist()))
            await Stream.of(other, "cpu:0")
            assert ran.is_set()
            await pynccl.wait(*works)
            works[0].order(other)  # of finished work nothing is left to wait for
        assert seen == [[sum(range(1, ranks + 1))] * 4]


async def test_a_stream_waits_for_a_stream_and_an_event(temper: str) -> None:
    order: list[str] = []
    with ForeignStream() as first, ForeignStream() as second, ForeignStream() as third:

        def slow() -> None:
            time.sleep(0.05)
            order.append("first")

        first.launch(slow)
        event = Stream.of(first, "cpu:0").record()
        Stream.of(second, "cpu:0").wait(event)
        Stream.of(third, "cpu:0").wait(Stream.of(first, "cpu:0"))
        second.launch(lambda: order.append("second"))
        third.launch(lambda: order.append("third"))
        del event
        gc.collect()  # an event may go while a stream still waits for it
        await Stream.of(second, "cpu:0")
        await Stream.of(third, "cpu:0")
    assert order[0] == "first"
    assert sorted(order[1:]) == ["second", "third"]


async def test_order_of_a_failed_work_holds_nobody(temper: str) -> None:
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    with ForeignStream() as other:
        work = comms[0].all_reduce(np.ones(4), timeout=0.05)
        work.order(other)
        ran = other.launch(lambda: None)
        with pytest.raises(DeadlineError):
            await work
        await abort(comms)
        assert await asyncio.to_thread(ran.wait, 5)


@pytest.mark.timing
async def test_a_deadline_ends_one_wait_alone(temper: str, loop: str) -> None:
    """A wait for a stream has no communicator that could fail with it."""
    async with busy(0.2) as (stream, more):
        patient = stream.done()
        event = stream.record()
        begun = time.perf_counter()
        with pytest.raises(DeadlineError, match="wait for a stream"):
            await stream.done(timeout=0.03)
        with pytest.raises(DeadlineError, match="recorded event"):
            await event.done(timeout=0.02)
        assert time.perf_counter() - begun < 0.15
        await patient
        await event
        await more()


async def test_an_event_is_not_reused_while_a_work_has_it(temper: str) -> None:
    """Many operations in flight, completed in any order of the streams: none too early."""
    async with clique(2) as comms:
        await all_reduced(comms)
        streams = [[Stream(f"cpu:{rank}") for _ in range(4)] for rank in range(2)]
        with testing.faults("op:delay=3ms,probability=0.5"):
            for _ in range(20):
                xs = [[np.full(4, rank + 1, np.float32) for _ in range(4)] for rank in range(2)]
                works = [
                    comms[rank].all_reduce(xs[rank][i], stream=streams[rank][i])
                    for i in range(4)
                    for rank in range(2)
                ]
                follower = Stream("cpu:0")
                for work in works[::2]:
                    follower.wait(work)
                await follower
                assert [x.tolist() for x in xs[0]] == [[3.0] * 4] * 4
                await pynccl.wait(*works)
