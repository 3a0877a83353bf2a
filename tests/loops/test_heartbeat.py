"""Whatever the engine does, a heartbeat on the loop goes on: what one process can show."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
from heartbeat import Heartbeat, gap_during, keeps_free, require_free
from running import alone, ones, pair
from support.ranks import run_processes

import pynccl
from pynccl import testing
from pynccl.errors import AbortedError, DeadlineError

pytestmark = pytest.mark.timing

# Calls that return at once whatever the device and the peers do. cuEventQuery and a launch may
# wait for another thread's launch, never for its end.
QUICK_CALLS = {
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuStreamGetId",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuStreamWaitValue32_v2",
    "cuThreadExchangeStreamCaptureMode"[:31],  # as the journal cuts it
    "ncclAllReduce",
}


async def test_a_blocking_call_is_seen(loop: str) -> None:
    """The heartbeat itself: it sees a sleep of 40 ms, and no sleep where there is none."""

    async def sleeps() -> None:
        time.sleep(0.04)  # noqa: ASYNC251 (that is what is tested)

    assert await gap_during(sleeps) >= 39
    await keeps_free(lambda: asyncio.sleep(0.2), "an idle loop")


@pytest.mark.parametrize("fault", ["init:stuck", "init:delay=5s"])
async def test_an_init_that_takes_5_s(loop: str, temper: str, fault: str) -> None:
    if fault == "init:delay=5s" and loop != "plain":
        fault = "init:delay=1s"

    async def part() -> None:
        start = time.monotonic()
        with testing.faults(fault):
            if fault == "init:stuck":
                with pytest.raises(DeadlineError):
                    await pynccl.create_all(["cpu:0", "cpu:1"], timeout=1.0)
                assert 0.9 < time.monotonic() - start < 1.5
            else:
                for comm in await pynccl.create_all(["cpu:0", "cpu:1"]):
                    await comm.abort()

    await keeps_free(part, fault)


async def test_an_abort_that_hangs(loop: str, temper: str) -> None:
    async def part() -> None:
        comms = await pynccl.create_all(["cpu:0", "cpu:1"])
        with testing.faults("abort:stuck=1s"):
            works = [comms[0].all_reduce(ones())]  # its peer never comes
            start = time.monotonic()
            aborts = [asyncio.ensure_future(comm.abort()) for comm in comms]
            with pytest.raises(AbortedError):
                await works[0]
            assert time.monotonic() - start < 0.5
            await asyncio.gather(*aborts)

    await keeps_free(part, "a hanging abort")


async def test_operations_past_the_launch_depth(loop: str, temper: str) -> None:
    """5000 operations that nobody awaits, each 20 us long, on a device with room for 1000."""

    async def part() -> None:
        x = ones()
        with testing.faults("op:delay=20us"):
            for _ in range(50):
                works = [comm.all_reduce(x) for _ in range(100)]
                await asyncio.sleep(0)
            await works[-1]
        assert comm.issued >= 5000

    async with alone() as comm:
        await keeps_free(part, "issuing past the launch depth")


async def test_a_device_that_is_full(loop: str, temper: str) -> None:
    """What finds no room on the device waits on the lane, in order, and the loop is free."""

    async def part() -> None:
        xs = [ones() for _ in range(400)]
        with testing.faults("op:delay=300ms,call=1"):
            works = []
            for i in range(0, 400, 50):
                works += [comm.all_reduce(x) for x in xs[i : i + 50]]
                await asyncio.sleep(0)
            assert not works[0].done()
            assert await pynccl.wait(*works) == xs
            assert [work.seq for work in works] == sorted(work.seq for work in works)

    async with alone() as comm:
        before = testing.live()["work_items"]
        await keeps_free(part, "a full device")
        assert testing.live()["work_items"] == before


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_reduction_of_64_MiB(loop: str, temper: str, ranks: int) -> None:
    async def part() -> None:
        await pynccl.wait(*(c.all_reduce(x) for c, x in zip(comms, xs, strict=True)))

    xs = [np.ones(1 << 24, np.float32) for _ in range(ranks)]
    if ranks == 2:
        async with pair() as comms:
            await keeps_free(part, "64 MiB over two ranks")
            assert xs[0][0] in (2.0, 4.0, 8.0, 16.0)
            assert (xs[1] == xs[0][0]).all()
    else:
        async with alone() as comm:
            comms = [comm]
            await keeps_free(part, "64 MiB on one rank")


async def test_memory_that_is_freed_behind_a_collective(loop: str, temper: str) -> None:
    """A free waits for the device; the loop does not, and neither do handles that it drops."""
    library = ctypes.CDLL(testing._library()._name)

    def free_elsewhere(context: ctypes.c_void_p, memory: ctypes.c_uint64) -> float:
        library.cuCtxSetCurrent(context)
        start = time.monotonic()
        assert library.cuMemFree_v2(memory) == 0
        return time.monotonic() - start

    async def part() -> None:
        context, memory = ctypes.c_void_p(), ctypes.c_uint64()
        assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        library.cuCtxSetCurrent(context)
        assert library.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)) == 0
        library.cuCtxSetCurrent(None)
        with testing.faults("op:delay=300ms"):
            work = comm.all_reduce(ones(), timed=True)
            stream = pynccl.Stream("cpu:0")
            freed = asyncio.ensure_future(asyncio.to_thread(free_elsewhere, context, memory))
            await asyncio.sleep(0.02)
            del stream  # its handle is destroyed while the device is busy
            await work
        assert await freed > 0.1
        assert work.duration >= 0.3

    async with alone() as comm:
        await keeps_free(part, "memory freed behind a collective")


async def test_a_driver_that_is_busy_elsewhere(loop: str) -> None:
    """While another thread holds the driver's lock a query waits, at most as long as that."""

    async def part() -> None:
        comm.all_reduce(ones())
        testing.hold_driver_lock(1.0)
        start = time.monotonic()
        for _ in range(20):
            await comm.all_reduce(ones())
            await asyncio.sleep(0.001)
        assert time.monotonic() - start < 1.5

    with testing.temper("gpulike"):
        async with alone() as comm:
            await keeps_free(part, "a driver held for 1 s", limit_ms=1000 + 50)


async def test_a_suspended_loop_beside_a_busy_driver(loop: str) -> None:
    """Who only waits meets no lock: the waiter thread asks the driver, not the loop."""

    async def part() -> None:
        with testing.faults("op:delay=1500ms"):
            work = comm.all_reduce(ones())
            task = asyncio.ensure_future(suspends(work))
            await asyncio.sleep(0.05)
            testing.hold_driver_lock(1.0)
            async with Heartbeat() as heartbeat:
                await task
            gaps.append(heartbeat.worst)

    with testing.temper("gpulike"):
        async with alone() as comm:
            gaps: list[float] = []
            for _ in range(3):
                await part()
                if gaps[-1] < 20:
                    break
            require_free(gaps, "a suspended wait beside a held driver")


async def suspends(work: Any) -> Any:
    return await work


async def test_only_quick_calls_are_made_on_the_loop(loop: str, temper: str) -> None:
    """Which thread made which native call, over a communicator's whole life."""

    async def life() -> None:
        async with alone() as comm:
            for _ in range(3):
                await comm.all_reduce(ones())
            child = await comm.split(0)
            assert child is not None
            await child.all_reduce(ones(), timed=True)
            await child.close()
        async with pair() as comms:
            await pynccl.wait(*(comm.all_gather(ones()) for comm in comms))
            await pynccl.wait(comms[0].send(ones(), 1), comms[1].recv(ones(), 0))
            await comms[0].abort()
            await comms[1].abort()
        dropped = await pynccl.create_all(["cpu:0", "cpu:1"])
        del dropped
        gc.collect()

    with testing.journal() as journal:
        await life()
        await asyncio.sleep(0.2)
    mine = {c.function for c in journal.calls if c.thread == threading.get_native_id()}
    assert "cuEventRecord" in mine
    assert mine <= QUICK_CALLS, f"called on the loop: {sorted(mine - QUICK_CALLS)}"


async def first_use(place: Any) -> float:
    """Rank function: making the process's first communicator beside a heartbeat."""

    async def part() -> None:
        unique_id = await pynccl.unique_id("cpu:0")
        comm = await pynccl.Communicator.create(1, 0, unique_id, device="cpu:0")
        await comm.all_reduce(ones())
        await comm.close()

    with testing.faults("call:delay=300ms,name=cuDevicePrimaryCtxRetain,times=1"):
        return await gap_during(part)


def test_the_first_context_is_made_off_the_loop() -> None:
    """A primary context takes a GPU some hundred milliseconds."""
    gaps = []
    for _ in range(3):
        gaps += run_processes(1, first_use, bare=True)
        if gaps[-1] < 20:
            break
    require_free(gaps, "the first communicator of a process")


async def launches_that_block(place: Any) -> list[float]:
    """Rank function: CUDA_LAUNCH_BLOCKING=1, and slow operations."""
    gaps = []
    async with alone() as comm:
        assert comm.issued
        for _ in range(3):
            async with Heartbeat() as heartbeat:
                with testing.faults("op:delay=200ms"):
                    works = [comm.all_reduce(ones()) for _ in range(5)]
                    await pynccl.wait(*works)
            gaps.append(heartbeat.worst)
            if gaps[-1] < 20:
                break
    return gaps


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
def test_launches_that_block(temper: Any) -> None:
    gaps = run_processes(
        1, launches_that_block, temper=temper, bare=True, env={"CUDA_LAUNCH_BLOCKING": "1"}
    )[0]
    require_free(gaps, "CUDA_LAUNCH_BLOCKING=1")
