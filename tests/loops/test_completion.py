"""Whatever happens to an operation, its await ends, with the right exception, and in time."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from typing import Any

import pytest
from heartbeat import Heartbeat, require_free
from running import alone, ones, pair
from support.ranks import run_processes

import pynccl
from pynccl import testing
from pynccl.errors import DeadlineError, NcclError, RemoteError

pytestmark = pytest.mark.timing

ACCURACY = 0.1
SECONDS = 3.0


async def ends(work: Any) -> tuple[BaseException | None, float]:
    """How an await ends, and after how many seconds."""
    start = time.monotonic()
    try:
        await work
    except Exception as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


async def meets_an_error(place: Any) -> dict[str, Any]:
    """Rank function: an error of the stream is its context's, for the process's life."""
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    with testing.faults("op:cuda_error=719,rank=0"):
        works = [comm.all_reduce(ones(), timeout=2.0) for comm in comms]
        error, after = await ends(works[0])
    state = comms[0].state
    await asyncio.gather(*(comm.abort() for comm in comms))
    return {"error": repr(error), "after": after, "state": state}


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_an_error_of_the_stream(kind: str, temper: Any) -> None:
    seen = run_processes(
        1, meets_an_error, bare=True, temper=temper, env={"PYNCCL_TEST_LOOP": kind}
    )[0]
    assert seen["error"].startswith("CudaError(")
    assert "719" in seen["error"]
    assert seen["after"] < 0.5
    assert seen["state"] == "failed"


async def test_callbacks_that_never_come(loop: str, temper: str) -> None:
    """Completion never rests on a callback, so that a skipped one changes nothing."""
    async with pair() as comms:
        with testing.faults("host_function:skip"):
            for _ in range(20):
                await pynccl.wait(*(comm.all_reduce(ones()) for comm in comms))


async def test_a_stuck_kernel(loop: str, temper: str) -> None:
    async with pair() as comms:
        with testing.faults("op:stuck,rank=1"):
            works = [comm.all_reduce(ones(), timeout=0.3) for comm in comms]
            (error, after), (other, _) = await asyncio.gather(*map(ends, works))
        assert isinstance(error, DeadlineError), error
        assert isinstance(other, DeadlineError), other
        assert 0.29 < after < 0.3 + ACCURACY
        assert error.operation == "all_reduce"
        assert error.nbytes == 16
        await asyncio.gather(*(comm.abort() for comm in comms))


async def test_a_communicator_that_fails(loop: str, temper: str) -> None:
    """NCCL's asynchronous error ends all that is pending on it, and success is out."""
    async with pair() as comms:
        with testing.faults("op:remote=6,rank=0"):
            other = comms[1].all_reduce(ones(), timeout=5.0)
            work = comms[0].all_reduce(ones(), timeout=5.0)
            error, after = await ends(work)
        assert isinstance(error, RemoteError), error
        assert after < 1.0
        assert comms[0].state == "failed"
        await asyncio.gather(*(comm.abort() for comm in comms))
        assert isinstance(other.exception(), NcclError)
        assert isinstance(work.exception(), RemoteError)


async def test_deadlines_are_kept(loop: str, temper: str) -> None:
    async with pair() as comms:
        work = comms[0].all_reduce(ones(), timeout=SECONDS)
        error, after = await ends(work)
        assert isinstance(error, DeadlineError)
        assert abs(after - SECONDS) < ACCURACY
        assert abs(error.elapsed - SECONDS) < ACCURACY
        await asyncio.gather(*(comm.abort() for comm in comms))


async def test_deadlines_of_different_lengths(loop: str, temper: str) -> None:
    """A later call with an earlier deadline is not kept waiting for the earlier one."""
    async with alone("cpu:0") as long, alone("cpu:1") as short:
        with testing.faults("op:stuck"):
            slow = long.all_reduce(ones(), timeout=30.0)
            await asyncio.sleep(0.05)
            quick = short.all_reduce(ones(), timeout=0.2)
            error, after = await ends(quick)
            assert isinstance(error, DeadlineError)
            assert abs(after - 0.2) < ACCURACY
            assert not slow.done()
        await asyncio.gather(long.abort(), short.abort())


@pytest.mark.parametrize("loop", ["plain", "uvloop"], indirect=True)
async def test_a_deadline_beside_a_busy_driver(loop: str) -> None:
    """Another thread has the driver's lock when it passes: the waiter's query hangs there."""
    with testing.temper("gpulike"):
        async with alone() as comm:
            with testing.faults("op:stuck"):
                work = comm.all_reduce(ones(), timeout=SECONDS)
                waiting = asyncio.ensure_future(ends(work))
                await asyncio.sleep(SECONDS - 0.4)
                testing.hold_driver_lock(1.0)
                async with Heartbeat() as heartbeat:
                    error, after = await waiting
            assert isinstance(error, DeadlineError)
            assert abs(after - SECONDS) < ACCURACY
            assert abs(error.elapsed - SECONDS) < ACCURACY
            require_free([heartbeat.worst], "a deadline beside a busy driver", 100.0)
            await comm.abort()


@pytest.mark.parametrize("loop", ["plain"], indirect=True)
@pytest.mark.parametrize("lead", [0.4, 1.6])
async def test_a_deadline_beside_a_held_interpreter(
    loop: str, temper: str, lead: float
) -> None:
    """The GIL is held for a second: over the deadline (0.4 s before it), or well before it.

    What the loop is told comes when it can run again; the operation's end is at its time.
    """
    sleep = ctypes.PyDLL(None).usleep  # a PyDLL keeps the GIL
    async with alone() as comm:
        with testing.faults("op:stuck"):
            start = time.monotonic()
            waiting = asyncio.ensure_future(ends(comm.all_reduce(ones(), timeout=SECONDS)))
            await asyncio.sleep(SECONDS - lead)
            holder = threading.Thread(target=sleep, args=(999_000,))
            holder.start()
            error, _ = await waiting
            after = time.monotonic() - start
        holder.join()
        assert isinstance(error, DeadlineError)
        assert abs(error.elapsed - SECONDS) < ACCURACY
        assert after < max(SECONDS, SECONDS - lead + 1) + ACCURACY
        await comm.abort()


async def test_a_deadline_of_a_lane(loop: str) -> None:
    """The call itself hangs, at its first contact: the deadline does not wait for it."""
    with testing.temper("gpulike"):
        async with pair(warm=False) as comms:
            work = comms[0].all_reduce(ones(), timeout=0.4)
            behind = comms[0].all_reduce(ones(), timeout=5.0)
            error, after = await ends(work)
            assert isinstance(error, DeadlineError)
            assert abs(after - 0.4) < ACCURACY
            other, after = await ends(behind)
            assert isinstance(other, NcclError)
            assert after < 0.1
            await asyncio.gather(*(comm.abort() for comm in comms))
