"""The caller's stream keeps its order, also where the call itself is deferred."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from cliques import abort, arrays, clique, reduce_all
from foreign_stream import ForeignStream
from support.ranks import Temper, run_processes

import pynccl
from pynccl import testing


@pytest.mark.parametrize("warm", [False, True], ids=["first contact", "contacted"])
async def test_what_follows_a_deferred_call_sees_its_result(temper: str, warm: bool) -> None:
    """Two ranks in a process are always deferred; the kernel behind is queued at once."""
    async with clique(2, warm=warm) as comms:
        xs = arrays(comms)
        seen: list[list[float]] = []
        with ForeignStream() as stream, testing.faults("op:delay=20ms"):
            mine = comms[0].all_reduce(xs[0], stream=stream)
            ran = stream.launch(lambda: seen.append(xs[0].tolist()))
            assert not ran.wait(0.02)  # the stream is held back until the peer has come
            theirs = comms[1].all_reduce(xs[1])
            await mine
            await theirs
            assert await asyncio.to_thread(ran.wait, 5)
        assert seen == [[3.0] * 4]


async def test_a_deferred_call_sees_what_came_before(temper: str) -> None:
    """What was on the caller's stream at the call has run before the operation reads."""
    async with clique(2) as comms:
        xs = [np.zeros(4, np.float32) for _ in comms]
        with ForeignStream(0) as first, ForeignStream(1) as second:
            works = []
            for stream, comm, x in zip((first, second), comms, xs, strict=True):
                stream.launch(partial(late, x, comm.rank + 1.0))
                works.append(comm.all_reduce(x, stream=stream))
            await pynccl.wait(*works)
        assert [x.tolist() for x in xs] == [[3.0] * 4] * 2


def late(x: Any, value: float) -> None:
    """Fill x, after a while."""
    time.sleep(0.03)
    x.fill(value)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_order_makes_a_stream_wait(temper: str, ranks: int) -> None:
    async with clique(ranks, warm=True) as comms:
        xs, seen = arrays(comms), []
        with ForeignStream() as stream, testing.faults("op:delay=20ms"):
            works = reduce_all(comms, xs)
            works[0].order(stream)
            ran = stream.launch(lambda: seen.append(xs[0].tolist()))
            works[0].order(stream)  # as often as one likes
            await pynccl.wait(*works)
            assert await asyncio.to_thread(ran.wait, 5)
            works[0].order(stream)  # also when it has ended
        assert seen == [[sum(range(1, ranks + 1))] * 4]


async def test_a_failed_operation_lets_the_stream_go_on(temper: str) -> None:
    """Nobody else would: a gate that stays shut would hang the caller's other work for good."""
    async with clique(2) as comms:
        with ForeignStream() as stream:
            work = comms[0].all_reduce(arrays(comms)[0], stream=stream, timeout=0.05)
            ran = stream.launch(lambda: None)
            with pytest.raises(pynccl.DeadlineError):
                await work
            assert await asyncio.to_thread(ran.wait, 5)
        await abort(comms)


async def test_without_memory_waits_a_deferred_call_raises(temper: str) -> None:
    """Quirk of some devices: where a stream cannot be held back, order cannot be kept."""
    with testing.settings(quirks="no-memory-ops"):
        async with clique(2) as comms:
            with ForeignStream() as stream, testing.journal() as journal:
                work = comms[0].all_reduce(arrays(comms)[0], stream=stream)
                with pytest.raises(pynccl.CudaError, match="cuStreamWaitValue32"):
                    await work
                assert journal.nccl() == []
            xs = arrays(comms)
            await pynccl.wait(*reduce_all(comms, xs))
            assert xs[1].tolist() == [3.0] * 4


async def test_a_stream_of_another_kind(temper: str) -> None:
    """A raw handle, an object that has one, and what is no stream at all."""

    class Torchlike:
        def __init__(self, handle: int) -> None:
            self.cuda_stream = handle

    async with clique(1, warm=True) as comms:
        x = np.ones(4, np.float32)
        with ForeignStream() as stream:
            for spelled in (stream, stream.handle, Torchlike(stream.handle)):
                with testing.journal() as journal:
                    await comms[0].all_reduce(x, stream=spelled)
                assert {call.stream for call in journal.named("ncclAllReduce")} == {
                    stream.handle
                }
        with testing.journal() as journal:
            for wrong in ("legacy", object(), 1.5, True):
                with pytest.raises(pynccl.UsageError, match="stream"):
                    comms[0].all_reduce(x, stream=wrong)
        assert journal.nccl() == []


# ---- each rank in a process of its own: deferred by first contact, inline later --------------


def look(x: Any, seen: list[bool]) -> None:
    seen.append(bool((x == 3).all()))


async def followed(comm: Any) -> list[bool]:
    """Whether a host function right behind the call saw the sum: first contact, then inline."""
    right = []
    with ForeignStream(comm.rank) as stream:
        for count in (8, 8, 1 << 16):
            x = np.full(count, comm.rank + 1, np.float32)
            seen: list[bool] = []
            work = comm.all_reduce(x, stream=stream)
            stream.launch(partial(look, x, seen))
            await work
            await asyncio.to_thread(stream.synchronize)
            right += seen
    return right


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
def test_what_follows_a_call_between_processes(temper: Temper) -> None:
    assert run_processes(2, followed, temper=temper) == [[True] * 3] * 2
