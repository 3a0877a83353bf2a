"""Closing, aborting, cancelling: what ends, in which order, and what is told."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import numpy as np
import pytest
from cliques import abort, all_reduced, arrays, clique, reduce_all

import pynccl
from pynccl import AbortedError, DeadlineError, NcclError, testing
from pynccl._communicator import abort_together


async def test_close_is_finalize_and_destroy(temper: str) -> None:
    comms: list[Any] = await pynccl.create_all(["cpu:0"])
    await all_reduced(comms)
    with testing.journal() as journal:
        await comms[0].close()
    assert journal.nccl() == ["ncclCommFinalize", "ncclCommDestroy"]
    assert comms[0].state == "closed"
    await comms[0].close()  # twice is once


async def test_close_that_does_not_end_aborts(temper: str) -> None:
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    await all_reduced(comms)
    with testing.journal() as journal:
        begun = time.perf_counter()
        with pytest.raises(DeadlineError):
            await comms[0].close(timeout=0.1)
        assert time.perf_counter() - begun < 0.6
        assert comms[0].state == "closed"
    calls = journal.nccl()
    assert "ncclCommAbort" in calls
    assert "ncclCommDestroy" not in calls
    await abort(comms[1:])


async def test_several_are_aborted_in_one_native_group(temper: str) -> None:
    """One after another they would wait for each other: flags first, then one group's end."""
    async with clique(2) as parents:
        children: list[Any] = await asyncio.gather(*(comm.split(0) for comm in parents))
        with testing.faults("op:stuck"):
            works = reduce_all(parents, arrays(parents)) + reduce_all(
                children, arrays(children)
            )
            with testing.journal() as journal:
                assert await abort_together([*parents, *children]) == "clean"
        for work in works:
            with pytest.raises(AbortedError):
                await work
    aborts = journal.named("ncclCommAbort")
    assert len(aborts) == 4
    assert len({call.thread for call in aborts}) == 1
    assert all(call.group_depth == 1 for call in aborts)
    ends = [call for call in journal.named("ncclGroupEnd") if call.thread == aborts[0].thread]
    assert len(ends) == 1
    assert ends[0].time_ns > max(call.time_ns for call in aborts)


async def test_operations_raise_before_the_abort_returns(temper: str) -> None:
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    with testing.faults("op:stuck;abort:delay=300ms"):
        works = reduce_all(comms, arrays(comms))
        begun = time.perf_counter()
        aborting = asyncio.gather(*(comm.abort() for comm in comms))
        for work in works:
            with pytest.raises(AbortedError):
                await work
        assert time.perf_counter() - begun < 0.25
        assert await aborting == ["clean", "clean"]
        assert time.perf_counter() - begun >= 0.3


async def test_an_abort_without_a_time_out_is_given_up_too(
    temper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pynccl._communicator.ABORT_BOUND", 0.1)
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    with testing.faults("call:stuck,name=ncclCommAbort"):
        begun = time.perf_counter()
        assert await comms[0].abort(timeout=None) == "abandoned"
        assert 0.1 <= time.perf_counter() - begun < 0.6
    await abort(comms[1:])


async def test_a_close_that_is_cancelled_ends_behind_the_scenes(temper: str, loop: str) -> None:
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    with testing.faults("finalize:delay=100ms"):
        closing = [asyncio.ensure_future(comm.close()) for comm in comms]
        await asyncio.sleep(0.02)
        for task in closing:
            task.cancel()
        outcomes = await asyncio.gather(*closing, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in outcomes)
        await asyncio.gather(*(comm.close() for comm in comms))
    assert [comm.state for comm in comms] == ["closed", "closed"]


# ---- cancellation ----------------------------------------------------------------------------


async def test_a_block_that_is_left_by_an_exception_aborts(temper: str, loop: str) -> None:
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    works = []
    with testing.journal() as journal, pytest.raises(ZeroDivisionError):
        async with comms[0], comms[1]:
            works = [comms[0].all_reduce(np.ones(4))]
            raise ZeroDivisionError
    assert journal.nccl().count("ncclCommAbort") == 2
    assert "ncclCommFinalize" not in journal.nccl()
    assert isinstance(works[0].exception(), AbortedError)


async def test_a_block_that_is_left_while_an_abort_is_stuck(temper: str) -> None:
    """The exception is not held up for long."""
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    with testing.faults("abort:stuck,rank=0"):
        begun = time.perf_counter()
        with pytest.raises(ZeroDivisionError):
            async with comms[0]:
                raise ZeroDivisionError
        assert time.perf_counter() - begun < 1.5
    await abort(comms[1:])


class Fault(Exception):
    """What a coroutine of the user raises."""


async def failing() -> None:
    await asyncio.sleep(0.02)
    raise Fault


async def waiting(comm: Any) -> None:
    try:
        await comm.all_reduce(np.ones(4))
    except asyncio.CancelledError:
        # An error of its own on the way out, which must come out beside the other.
        raise RuntimeError("given up") from None


@pytest.mark.parametrize("with_block", [False, True], ids=["around", "with its block"])
async def test_a_collective_beside_a_coroutine_that_fails(
    temper: str, loop: str, with_block: bool
) -> None:
    """A task that waits for a peer for ever is no obstacle, and both errors come out."""
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    begun = time.perf_counter()
    if sys.version_info >= (3, 11):
        with pytest.raises(BaseExceptionGroup) as raised:  # noqa: F821 (Python 3.11)
            async with asyncio.TaskGroup() as group:
                group.create_task(waiting(comms[0]))
                group.create_task(failing())
        kinds = {type(error) for error in raised.value.exceptions}
    else:
        tasks = [asyncio.ensure_future(one) for one in (waiting(comms[0]), failing())]
        _, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in left:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {type(end) for end in ends}
    assert kinds == {Fault, RuntimeError}
    if with_block:
        with pytest.raises(Fault):
            async with comms[0]:
                raise Fault
    else:
        await comms[0].abort()
    assert time.perf_counter() - begun < 1
    await abort(comms[1:])


async def test_cancelling_an_await_takes_nothing_back(temper: str, loop: str) -> None:
    """The peer has issued its part: the operation goes on, and a later await has the result."""
    async with clique(2) as comms:
        xs = arrays(comms)
        with testing.faults("op:delay=400ms"):
            works = reduce_all(comms, xs)
            for _ in range(3):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(works[0].future(), 0.01)
            await pynccl.wait(*works)
        assert [x.tolist() for x in xs] == [[3.0] * 4] * 2


async def test_a_failure_names_the_first_cause(temper: str) -> None:
    """Those that went down with the culprit say who it was, and chain to it."""
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    first = comms[0].all_reduce(np.ones(4), timeout=0.05)
    second = comms[0].all_reduce(np.ones(4), timeout=20)
    with pytest.raises(DeadlineError) as raised:
        await second
    assert isinstance(raised.value.__cause__, NcclError)
    assert f"operation {first.seq}" in str(raised.value)
    await abort(comms)
