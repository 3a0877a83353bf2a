"""Every wait has a deadline that raises, says what it waited for, and spares the process."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest
from cliques import abort, all_reduced, arrays, clique, reduce_all

import pynccl
from pynccl import ConfigError, DeadlineError, testing

pytestmark = pytest.mark.usefixtures("temper")
MANY = 50
"""More than the operations of these tests."""


async def test_what_a_deadline_error_says(loop: str) -> None:
    async with clique(2) as comms:
        x = np.zeros((3, 5), np.float64)
        start = time.perf_counter()
        work = comms[0].all_reduce(x, timeout=0.1)
        with pytest.raises(DeadlineError, match=r"all_reduce.*120 bytes of float64") as raised:
            await work
        waited = time.perf_counter() - start
        error = raised.value
        assert isinstance(error, TimeoutError)
        assert error.operation == "all_reduce"
        assert error.seq == work.seq == comms[0].issued
        assert (error.nbytes, error.dtype) == (120, "float64")
        assert 0.1 <= error.elapsed <= waited < 0.4
        assert "rank 0 of 2" in str(error)
        assert str(work.exception()) == str(error)
        with pytest.raises(DeadlineError):
            work.result()
        with pytest.raises(DeadlineError):
            await work.future()
        await abort(comms)


@pytest.mark.parametrize("warm", [True, False], ids=["on the device", "in a call"])
async def test_the_other_pending_operations_fail_too(warm: bool) -> None:
    """One communicator, one order: behind what hangs nothing can come. The cause is chained."""
    async with clique(2, warm=warm) as comms:
        works = [comms[0].all_reduce(np.zeros(4), timeout=0.1)]
        works += [comms[0].broadcast(np.zeros(4), 1) for _ in range(3)]
        works.append(comms[0].barrier(timeout=math.inf))
        with pytest.raises(DeadlineError) as first:
            await works[0]
        assert comms[0].state == "failed"
        await asyncio.sleep(0.01)
        for work in works[1:]:
            assert work.done()
            with pytest.raises(DeadlineError, match="ended with its communicator") as other:
                await work
            assert other.value is not first.value
            assert isinstance(other.value.__cause__, DeadlineError)
            assert f"operation {works[0].seq}" in str(other.value.__cause__)
        with pytest.raises(DeadlineError):
            await pynccl.wait(*works)
        await abort(comms)


async def test_a_new_communicator_can_be_made_at_once() -> None:
    """The failed one holds its threads and its device until its abort, and bothers nobody."""
    async with clique(2) as comms:
        with pytest.raises(DeadlineError):
            await comms[0].all_reduce(np.zeros(4), timeout=0.05)
        async with clique(2) as others:
            await all_reduced(others)
        await abort(comms)
    async with clique(2) as comms:
        await all_reduced(comms)


async def test_the_default_of_the_communicator() -> None:
    async with clique(2) as comms:
        assert comms[0].timeout == 600
        comms[0].timeout = 0.05
        with pytest.raises(DeadlineError):
            await comms[0].all_reduce(np.zeros(4))
        await abort(comms)


async def test_the_default_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_TIMEOUT", "0.1")
    async with clique(2) as comms:
        assert comms[0].timeout == 0.1
        comms[1].timeout = 5
        with pytest.raises(DeadlineError):
            await comms[0].all_reduce(np.zeros(4))
        await abort(comms)
    monkeypatch.setenv("PYNCCL_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="PYNCCL_TIMEOUT is 'soon', expected a number"):
        await pynccl.create_all(["cpu:0"])
    monkeypatch.setenv("PYNCCL_TIMEOUT", "inf")
    async with clique(1) as comms:
        await all_reduced(comms)
    monkeypatch.delenv("PYNCCL_TIMEOUT")
    async with clique(1) as comms:
        assert comms[0].timeout == 600


async def test_no_deadline() -> None:
    async with clique(2, warm=True) as comms:
        comms[0].timeout = 0.03
        xs = arrays(comms)
        with testing.faults("op:delay=100ms"):
            await pynccl.wait(*reduce_all(comms, xs, timeout=math.inf))
        assert xs[0].tolist() == [3.0] * 4


@pytest.mark.timing
async def test_a_deadline_counts_from_the_call_and_needs_no_loop() -> None:
    """It is kept natively: a loop that is busy, or none at all, does not put it off."""
    async with clique(2) as comms:
        work = comms[0].all_reduce(np.zeros(4), timeout=0.05)
        time.sleep(0.15)  # noqa: ASYNC251 (the loop is to be busy)
        assert work.done()
        error = work.exception()
        assert isinstance(error, DeadlineError)
        assert 0.05 <= error.elapsed < 0.1
        await abort(comms)


async def test_a_deadline_that_does_not_strike_leaves_no_trace() -> None:
    async with clique(2, warm=True) as comms:
        xs = arrays(comms)
        works = reduce_all(comms, xs, timeout=0.1)
        await pynccl.wait(*works)
        await asyncio.sleep(0.15)
        assert {comm.state for comm in comms} == {"ready"}
        assert works[0].exception() is None
        await all_reduced(comms)


@pytest.mark.parametrize("timeout", [0, 1e-9])
async def test_a_deadline_that_has_passed_at_the_call(timeout: float) -> None:
    async with clique(2) as comms:
        with pytest.raises(DeadlineError):
            await comms[0].all_reduce(np.zeros(4), timeout=timeout)
        await abort(comms)


@pytest.mark.parametrize("grouped", [False, True])
async def test_a_deadline_of_a_group(grouped: bool) -> None:
    async with clique(2, warm=grouped) as comms:
        with pytest.raises(DeadlineError):
            async with pynccl.group() as group:
                for _ in range(3):
                    comms[0].all_reduce(np.zeros(4), timeout=0.05)
        assert all(isinstance(work.exception(), DeadlineError) for work in group.works)
        await abort(comms)


# ---- creation, split, close ------------------------------------------------------------------


async def test_a_rank_that_never_comes() -> None:
    unique_id = await pynccl.unique_id("cpu")
    start = time.perf_counter()
    with pytest.raises(DeadlineError, match=r"init.*rank 0 of 2") as raised:
        await pynccl.Communicator.create(2, 0, unique_id, device="cpu", timeout=0.1)
    assert 0.1 <= time.perf_counter() - start < 0.5
    assert raised.value.operation == "init"
    async with clique(2) as comms:
        await all_reduced(comms)


async def test_a_split_that_not_all_call() -> None:
    async with clique(2) as comms:
        with pytest.raises(DeadlineError, match="split") as raised:
            await comms[0].split(0, timeout=0.1)
        assert raised.value.operation == "split"
        await abort(comms)


async def test_a_close_that_not_all_call() -> None:
    """The real library waits for the peers of the machine; the communicator is then aborted."""
    with testing.faults("finalize:stuck,rank=0"):
        comms = await pynccl.create_all(["cpu:0", "cpu:1"])
        start = time.perf_counter()
        with pytest.raises(DeadlineError, match="close"):
            await comms[0].close(timeout=0.1)
        assert time.perf_counter() - start < 1
        assert comms[0].state == "closed"
        assert await comms[1].abort() == "clean"


async def test_a_stuck_init_is_aborted() -> None:
    with testing.faults("init:stuck,rank=1"), pytest.raises(DeadlineError, match="init"):
        await pynccl.create_all(["cpu:0", "cpu:1"], timeout=0.1)
    async with clique(2) as comms:
        await all_reduced(comms)


async def test_one_failed_init_fails_the_others_at_once() -> None:
    """Those who came would otherwise wait for the one who will not until their deadline."""
    start = time.perf_counter()
    with testing.faults("init:fail=3,rank=1"), pytest.raises(pynccl.NcclError) as raised:
        await pynccl.create_all(["cpu:0", "cpu:1", "cpu:2"], timeout=20)
    assert not isinstance(raised.value, DeadlineError)
    assert time.perf_counter() - start < 2


# ---- nobody waits on the loop ----------------------------------------------------------------


@pytest.mark.timing
async def test_the_loop_beats_on_while_everything_hangs() -> None:
    """No call, await or failure holds the loop: a 1 ms heartbeat sees no long gap."""
    gaps: list[float] = []

    async def beat() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    async def operate(comm: Any) -> None:
        works = [comm.all_reduce(np.zeros(4), timeout=0.2) for _ in range(MANY)]
        for work in works:
            with pytest.raises(DeadlineError):
                await work

    async with clique(2) as comms:
        heart = asyncio.create_task(beat())
        await operate(comms[0])
        await abort(comms)
        heart.cancel()
    assert len(gaps) > 50
    gaps.sort()
    assert gaps[-3] < 0.02, gaps[-10:]  # this machine's own hiccups are given two
