"""What the binding itself calls, counted by an engine that exports its list of names alone.

The same compiled binding: nothing here knows more of the engine than its file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cliques import abort, clique

import pynccl
from pynccl import _engines

COLLECTIVES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "all_reduce": ("ncclAllReduce", lambda c, x: c.all_reduce(x)),
    "reduce": ("ncclReduce", lambda c, x: c.reduce(x)),
    "broadcast": ("ncclBroadcast", lambda c, x: c.broadcast(x)),
    "all_gather": ("ncclAllGather", lambda c, x: c.all_gather(x)),
    "reduce_scatter": ("ncclReduceScatter", lambda c, x: c.reduce_scatter(x)),
    "all_to_all": ("ncclAlltoAll", lambda c, x: c.all_to_all(x)),
    "gather": ("ncclGather", lambda c, x: c.gather(x)),
    "scatter": ("ncclScatter", lambda c, x: c.scatter(x)),
    "send": ("ncclSend", lambda c, x: c.send(x, 0)),
    "recv": ("ncclRecv", lambda c, x: c.recv(x, 0)),
    "barrier": ("ncclAllReduce", lambda c, x: c.barrier()),
}
WATCHED = (
    *sorted({function for function, _ in COLLECTIVES.values()}),
    "ncclGroupStart",
    "ncclGroupEnd",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamWaitEvent",
    "cuStreamWaitValue32_v2",
    "cuLaunchHostFunc",
    "cuEventSynchronize",
    "cuStreamSynchronize",
)


@pytest.fixture(autouse=True)
def noop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make "cpu" mean the no-op engine."""
    monkeypatch.setenv("PYNCCL_ENGINE", "noop")


class Counts:
    """Calls since it was made, of the functions that an operation could need."""

    def __init__(self) -> None:
        self._engine = _engines.engine("noop")
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        return {name: int(self._engine.parameter(name)) for name in WATCHED}

    def taken(self) -> dict[str, int]:
        now = self._now()
        return {n: now[n] - self._before[n] for n in WATCHED if now[n] != self._before[n]}


async def test_it_is_the_noop_engine() -> None:
    async with clique(1) as comms:
        assert comms[0].engine.name == "noop"
        path = comms[0].engine.path("ncclAllReduce")
        assert path.endswith("libpynccl_noop.so")
        assert pynccl.library_info()["noop"]["nccl"] == path


@pytest.mark.parametrize("name", COLLECTIVES)
async def test_an_operation_is_one_call_and_one_event(name: str) -> None:
    """Nothing is synchronised, and no host function enters the stream."""
    function, call = COLLECTIVES[name]
    async with clique(1) as comms:
        x = np.zeros(4, np.float32)
        await call(comms[0], x)  # the first goes through the lane, and makes the event
        counts = Counts()
        work = call(comms[0], x)
        issued = counts.taken()
        assert issued.pop("cuEventQuery", 0) <= 1  # the waiter may have looked already
        assert issued == {function: 1, "cuEventRecord": 1}
        await work
        assert counts.taken() == {function: 1, "cuEventRecord": 1, "cuEventQuery": 1}


async def test_an_await_of_finished_work_asks_nothing() -> None:
    async with clique(1) as comms:
        work = comms[0].all_reduce(np.zeros(4))
        await work
        counts = Counts()
        for _ in range(10):
            await work
            assert work.done()
        assert counts.taken() == {}


async def test_many_need_few_queries() -> None:
    """Of a batch in one stream the oldest and the newest are asked, not each."""
    async with clique(1) as comms:
        x = np.zeros(4)
        await comms[0].all_reduce(x)
        counts = Counts()
        works = [comms[0].all_reduce(x) for _ in range(20)]
        await pynccl.wait(*works)
        taken = counts.taken()
        assert taken["ncclAllReduce"] == taken["cuEventRecord"] == 20
        assert taken["cuEventQuery"] <= 20


async def test_a_group_is_one_pair_and_one_event_a_stream() -> None:
    async with clique(1) as comms:
        x = np.zeros(4)
        await comms[0].all_reduce(x)
        counts = Counts()
        async with pynccl.group():
            for _ in range(10):
                comms[0].all_reduce(x)
            assert counts.taken() == {}
        taken = counts.taken()
        assert taken.pop("cuEventQuery") in (1, 2)
        assert taken == {
            "ncclGroupStart": 1,
            "ncclAllReduce": 10,
            "ncclGroupEnd": 1,
            "cuEventRecord": 1,
        }


async def test_a_dropped_work_is_polled_by_the_waiter() -> None:
    async with clique(1) as comms:
        comms[0].all_reduce(np.zeros(4))
        await asyncio.sleep(0.05)
        assert pynccl.diagnostics()["operations"] == 0


async def test_a_stream_of_the_caller() -> None:
    async with clique(2) as comms:
        counts = Counts()
        work = comms[0].all_reduce(np.zeros(4), stream=2)
        await work
        # Deferred: marked and gated at the call, followed by the lane.
        taken = counts.taken()
        assert taken["cuStreamWaitEvent"] == taken["cuStreamWaitValue32_v2"] == 1
        work.order(2)
        with pytest.raises(pynccl.UsageError, match="a host array has no stream"):
            comms[0].all_reduce(np.zeros(4), stream="current")


async def test_split_close_and_abort() -> None:
    async with clique(2) as comms:
        children = await asyncio.gather(*(comm.split(comm.rank) for comm in comms))
        none = await comms[0].split(None)
        assert none is None
        assert all(child is not None for child in children)
        for child in children:
            assert child is not None
            await child.all_reduce(np.zeros(4))
        await children[0].close()
        await abort(children[1:])
        assert {child.state for child in children} == {"closed"}


async def test_what_it_lacks_is_named() -> None:
    engine = _engines.engine("noop")
    with pytest.raises(pynccl.NotSupportedError, match="ncclNoSuchThing is not known here"):
        engine.require("ncclNoSuchThing")
    with pytest.raises(pynccl.ConfigError, match="ncclParamGetParameter returned"):
        engine.parameter("ncclNoSuchThing")
