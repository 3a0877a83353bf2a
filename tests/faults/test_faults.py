"""Every fault of the host engine ends in the right exception, in time, and hurts no other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from cliques import abort, all_reduced, arrays, clique, reduce_all
from support.ranks import Temper, run_processes

import pynccl
from pynccl import (
    ConfigError,
    CudaError,
    DeadlineError,
    InternalError,
    NcclError,
    RemoteError,
    SystemCallError,
    testing,
)

LIMIT = 0.3
"""The deadline of what is tried, in seconds."""
SLACK = 0.5
"""How much later the exception may come."""

Ends = list[Any]
Action = Callable[[list[Any]], Awaitable[Ends]]


async def ends_of(*waits: Awaitable[Any]) -> Ends:
    return await asyncio.gather(*waits, return_exceptions=True)


async def operate(comms: list[Any]) -> Ends:
    """An operation on every rank."""
    works = reduce_all(comms, arrays(comms), timeout=LIMIT)
    return await ends_of(*(work.future() for work in works))


async def operate_in_a_group(comms: list[Any]) -> Ends:
    """Two operations a rank, as one native group of each rank."""
    groups = []
    for comm in comms:
        with pynccl.group() as group:
            comm.all_reduce(np.ones(4), timeout=LIMIT)
            comm.all_reduce(np.ones(8), timeout=LIMIT)
        groups.append(group)
    return await ends_of(*(pynccl.wait(*group.works) for group in groups))


async def split(comms: list[Any]) -> Ends:
    return await ends_of(*(comm.split(0, timeout=LIMIT) for comm in comms))


async def close(comms: list[Any]) -> Ends:
    return await ends_of(*(comm.close(timeout=LIMIT) for comm in comms))


def case(action: Action, rules: str, *errors: type[BaseException], marks: Any = ()) -> Any:
    """A fault, and what it may end in; the ranks that are not hit may also miss a peer."""
    return pytest.param(action, rules, errors, id=f"{action.__name__} {rules}", marks=marks)


FAULTS = [
    case(operate, "op:delay=10s", DeadlineError),
    case(operate, "op:stuck", DeadlineError),
    case(operate, "op:stuck,rank=1", DeadlineError),
    case(operate, "op:fail=3,rank=0", InternalError),
    case(operate, "op:remote=6,rank=0", RemoteError),
    case(operate, "call:fail=1,name=ncclAllReduce", CudaError),
    case(operate, "call:fail=2,name=ncclAllReduce,rank=1", SystemCallError),
    case(operate, "call:stuck,name=ncclAllReduce,rank=0", DeadlineError),
    case(operate, "call:delay=1s,name=ncclAllReduce", DeadlineError),
    case(operate, "call:fail=999,name=cuEventRecord", CudaError),
    case(operate, "call:fail=999,name=cuEventQuery", CudaError),
    case(operate, "call:stuck=400ms,name=cuEventRecord", DeadlineError),
    case(operate, "event:fail=999", CudaError),
    case(operate, "event:stuck=600ms", DeadlineError),
    case(operate, "call:fail=6,name=ncclCommGetAsyncError;op:stuck", InternalError),
    case(operate_in_a_group, "call:fail=2,name=ncclGroupStart", SystemCallError),
    case(operate_in_a_group, "call:fail=3,name=ncclAllReduce,call=2", InternalError),
    case(
        operate_in_a_group,
        "call:fail=2,name=ncclGroupEnd",  # also when the binding repairs the depth
        SystemCallError,
        marks=pytest.mark.misuse,
    ),
    case(operate_in_a_group, "call:stuck,name=ncclGroupEnd", DeadlineError),
    case(split, "call:fail=3,name=ncclCommSplit", InternalError),
    case(split, "call:fail=4,name=ncclCommSplit", ConfigError),
    case(split, "call:stuck,name=ncclCommSplit", DeadlineError),
    case(split, "call:stuck,name=ncclCommSplit,rank=0", DeadlineError),
    case(split, "init:stuck,rank=0", DeadlineError),
    case(split, "init:delay=10s", DeadlineError),
    case(split, "init:fail=3,rank=0", InternalError),
    case(close, "finalize:fail=3", InternalError),
    case(close, "finalize:stuck", DeadlineError),
    case(close, "finalize:delay=10s", DeadlineError),
    case(close, "call:fail=2,name=ncclCommFinalize", SystemCallError),
    case(close, "destroy:stuck", DeadlineError),
    case(close, "destroy:delay=1s", DeadlineError),
    case(close, "call:stuck,name=ncclCommDestroy", DeadlineError),
]


@pytest.mark.parametrize(("action", "rules", "errors"), FAULTS)
async def test_a_fault_ends_in_time(
    temper: str, action: Action, rules: str, errors: tuple[type[BaseException], ...]
) -> None:
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    await all_reduced(comms)
    with testing.faults(rules):
        start = time.perf_counter()
        ends = await action(comms)
        took = time.perf_counter() - start
    for comm in comms:
        await comm.abort()
    assert took < LIMIT + SLACK
    assert all(isinstance(end, (*errors, DeadlineError)) for end in ends), ends
    assert any(isinstance(end, errors) for end in ends), ends
    # The process lives, and others on the same devices work at once.
    async with clique(2) as others:
        await all_reduced(others)


INIT_FAULTS = {
    "init:fail=3": InternalError,
    "init:fail=3,rank=1": NcclError,  # the other rank may be the first to notice
    "init:remote=6": RemoteError,
    "init:stuck": DeadlineError,
    "init:stuck,rank=1": DeadlineError,
    "init:delay=10s,rank=0": DeadlineError,
    "init:in_progress=3": NcclError,
    "call:fail=2,name=ncclCommInitRankConfig,call=2": SystemCallError,
    "call:stuck,name=ncclCommInitRankConfig": DeadlineError,
    "call:fail=2,name=cuStreamCreateWithPriority,call=2": CudaError,
    "call:fail=2,name=ncclGetUniqueId": SystemCallError,
}


@pytest.mark.parametrize("rules", INIT_FAULTS)
async def test_a_fault_of_the_init_ends_in_time(temper: str, rules: str) -> None:
    start = time.perf_counter()
    with testing.faults(rules), pytest.raises(INIT_FAULTS[rules]):
        await pynccl.create_all(["cpu:0", "cpu:1"], timeout=LIMIT)
    assert time.perf_counter() - start < LIMIT + SLACK
    async with clique(2) as comms:
        await all_reduced(comms)


async def test_what_does_not_end_the_operation(temper: str) -> None:
    """Nothing hangs on callbacks, and a slow event is only late."""
    async with clique(2) as comms:
        for rules in ("host_function:skip", "event:delay=5ms", "op:delay=5ms"):
            with testing.faults(rules):
                await all_reduced(comms)


@pytest.mark.parametrize("polls", [1, 50])
async def test_a_call_that_says_in_progress(temper: str, polls: int) -> None:
    """Blocking communicators never do: the result is right, or there is none."""
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    with testing.faults(f"op:in_progress={polls},rank=0"):
        ends = await operate(comms)
    for end in ends:
        assert isinstance(end, NcclError) or end.tolist() == [3.0] * 4
    await abort(comms)


async def test_an_init_that_narrows_the_affinity(temper: str) -> None:
    """Neither this thread nor one that is started later is bound to a core by it."""
    before = os.sched_getaffinity(0)
    with testing.faults("init:affinity"):
        async with clique(2) as comms:
            await all_reduced(comms)
            assert os.sched_getaffinity(0) == before
            assert await asyncio.to_thread(os.sched_getaffinity, 0) == before


# ---- what a failed communicator's events say -------------------------------------------------


@pytest.mark.parametrize("how", ["abort", "deadline", "remote"])
async def test_no_success_after_a_failure(temper: str, how: str) -> None:
    """After an abort the kernels exit and their events say success; no Work does."""
    rules = "op:remote=6,name=ncclAllReduce" if how == "remote" else "op:stuck"
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    timeout = 0.1 if how == "deadline" else 20.0
    with testing.faults(rules):
        works = []
        with contextlib.suppress(pynccl.UsageError):  # the communicator has failed already
            for _ in range(20):
                works += reduce_all(comms, arrays(comms), timeout=timeout)
        if how == "abort":
            await asyncio.sleep(0.02)
        else:
            await ends_of(*(work.future() for work in works))
        await abort(comms)
        ends = await ends_of(*(work.future() for work in works))
    assert all(isinstance(end, NcclError) for end in ends), ends
    assert all(work.done() and work.exception() is not None for work in works)


async def test_nothing_is_issued_on_a_failed_communicator(temper: str) -> None:
    comms: list[Any] = await pynccl.create_all(["cpu:0", "cpu:1"])
    with testing.faults("op:stuck"):
        await ends_of(reduce_all(comms, arrays(comms), timeout=0.05)[0].future())
    with testing.journal() as journal:
        for call in (comms[0].barrier, lambda: comms[0].all_reduce(np.ones(4))):
            with pytest.raises(pynccl.UsageError, match=r"has failed.*deadline"):
                call()
        with pytest.raises(pynccl.UsageError, match="has failed"):
            await comms[0].split(0)
        assert journal.nccl() == []
    await abort(comms)


# ---- a process that dies, a context that is lost ---------------------------------------------


async def outlive(comm: Any) -> list[Any]:
    """Rank 1 dies in the second operation."""
    x = np.ones(4, np.float32)
    await comm.all_reduce(x)
    start = time.perf_counter()
    try:
        await comm.all_reduce(x, timeout=20)
    except NcclError as error:
        took = time.perf_counter() - start
        ended = await comm.abort()
        async with clique(2) as others:
            await all_reduced(others)
        return [type(error).__name__, took < 1.5, ended]
    return ["no error"]


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
def test_a_killed_rank_in_another_process(temper: Temper) -> None:
    """The survivor hears of it, and goes on with others."""
    faults = {"PYNCCL_HOST_FAULTS": "op:kill,name=ncclAllReduce,rank=1,call=2"}
    values = run_processes(2, outlive, temper=temper, env=faults, exits={1: -9})
    assert values[0][0] in ("RemoteError", "PeerLostError")
    assert values[0][1:] == [True, "clean"]


async def lose_the_context(comm: Any, rules: str) -> list[str]:
    """A sticky error: all that is pending on the device is lost, another device is not."""
    ends = []
    with testing.faults(rules):
        works = []
        with contextlib.suppress(pynccl.UsageError):  # the communicator has failed already
            for _ in range(3):
                works.append(comm.all_reduce(np.ones(4, np.float32), timeout=2))
        for work in works:
            try:
                await work
                ends.append("success")
            except NcclError as error:
                ends.append(type(error).__name__)
        await comm.abort(timeout=1)
    other = await pynccl.create_all(["cpu:5", "cpu:6"])
    await all_reduced(other)
    await asyncio.gather(*(one.close() for one in other))
    return ends


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
@pytest.mark.parametrize("site", ["op", "event"])
def test_a_lost_context(temper: Temper, site: str) -> None:
    for ends in run_processes(
        2, lose_the_context, temper=temper, arguments=[f"{site}:cuda_error=700"]
    ):
        assert "success" not in ends
        assert "CudaError" in ends
