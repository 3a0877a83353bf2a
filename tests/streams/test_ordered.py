"""Several communicators on one device: `ordered` chains them in the order of the calls."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.ranks import Temper, run_processes

import pynccl
from pynccl import DeadlineError, RemoteError, Stream


async def crossed(comm: Any, ordered: bool, agree: bool) -> list[Any]:
    """Two communicators of the same ranks on the same devices.

    The streams differ, so that nothing else keeps the order; with `agree` both ranks call in
    the same order, else each in its own.
    """
    other = await comm.split(0)
    for one in (comm, other):  # the first contact waits in the call, where no order helps
        await one.all_reduce(np.ones(4, np.float32))
    comm.ordered = other.ordered = ordered
    ends: list[Any] = []
    for _ in range(5 if agree else 50):  # by luck the devices may agree for a while
        xs = [np.full(4, comm.rank + 1, np.float32) for _ in range(2)]
        pair = [(comm, xs[0]), (other, xs[1])]
        if comm.rank == 1 and not agree:
            pair.reverse()
        works = [one.all_reduce(x, timeout=0.8) for one, x in pair]
        try:
            await pynccl.wait(*works)
        except (
            DeadlineError,
            RemoteError,
        ):  # or the other gave up first
            ends.append("deadlock")
            break
        ends.append([float(x[0]) for x in xs])
    await asyncio.gather(comm.abort(), other.abort())
    return ends


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
def test_an_agreed_order_passes_when_it_is_chained(temper: Temper) -> None:
    values = run_processes(2, crossed, temper=temper, arguments=[True, True])
    assert values == [[[3.0, 3.0]] * 5] * 2


@pytest.mark.parametrize("ordered", [False, True], ids=["free", "chained"])
def test_different_orders_deadlock(ordered: bool) -> None:
    """One collective at a time on a device; the calls' agreement is the caller's affair."""
    values = run_processes(2, crossed, temper="gpulike", arguments=[ordered, False])
    assert all("deadlock" in ends for ends in values)


async def interleaved(comm: Any, ordered: bool) -> list[str]:
    """The same calls in the same order on both ranks, but rank 0's first one is held back.

    Its device would begin with the second, and rank 1's with the first.
    """
    from foreign_stream import ForeignStream

    other = await comm.split(0)
    for one in (comm, other):  # the first contact waits in the call, where no order helps
        await one.all_reduce(np.ones(4, np.float32))
    comm.ordered = other.ordered = ordered
    ends = []
    with ForeignStream(comm.rank) as mine:
        stream = Stream.of(mine, comm.device if comm.rank == 0 else "cpu:1")
        if comm.rank == 0:
            mine.launch(_pause)
        xs = [np.full(4, comm.rank + 1, np.float32) for _ in range(2)]
        works = [
            comm.all_reduce(xs[0], stream=stream, timeout=1.0),
            other.all_reduce(xs[1], timeout=1.0),
        ]
        for work in works:
            try:
                await work
                ends.append("done")
            except DeadlineError:
                ends.append("deadlock")
            except pynccl.NcclError as error:
                ends.append(type(error).__name__)
        await asyncio.gather(comm.abort(), other.abort())
    return ends


def _pause() -> None:
    import time

    time.sleep(0.1)


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
def test_the_chain_keeps_the_order_of_the_calls(temper: Temper) -> None:
    values = run_processes(2, interleaved, temper=temper, arguments=[True])
    assert values == [["done", "done"]] * 2
