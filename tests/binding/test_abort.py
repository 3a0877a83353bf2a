"""The end that waits for nobody: abort, blocks that raise, communicators that are dropped."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cliques import abort, all_reduced, arrays, clique, gone, reduce_all

import pynccl
from pynccl import AbortedError, testing


async def test_pending_operations_are_aborted(temper: str, loop: str) -> None:
    async with clique(2) as comms:
        works = [comms[0].all_reduce(np.zeros(4)) for _ in range(3)]
        waiting = asyncio.ensure_future(awaited(works[0]))
        await asyncio.sleep(0.02)
        start = time.perf_counter()
        assert await comms[0].abort() == "clean"
        assert time.perf_counter() - start < 0.5
        for work in works:
            assert work.done()
            with pytest.raises(AbortedError, match=r"all_reduce.*aborted on this side"):
                await work
        with pytest.raises(AbortedError):
            await waiting
        assert comms[0].state == "closed"
        with pytest.raises(pynccl.UsageError, match="closed"):
            comms[0].barrier()
        await abort(comms)
    async with clique(2) as comms:
        await all_reduced(comms)


async def awaited(work: Any) -> Any:
    return await work


async def test_an_abort_that_overtakes_the_device(temper: str) -> None:
    """Failure wins: a kernel that an abort ends is complete for the device, and no success."""
    async with clique(1, warm=True) as comms:
        with testing.faults("op:delay=80ms"):
            works = reduce_all(comms, arrays(comms))
            ending = asyncio.ensure_future(comms[0].abort())
            with pytest.raises(AbortedError):
                await works[0]
            assert await ending == "clean"
        await asyncio.sleep(0.1)
        with pytest.raises(AbortedError):
            works[0].result()


async def test_buffers_are_held_until_the_abort_has_returned(temper: str) -> None:
    async with clique(2, warm=True) as comms:
        x = np.zeros(1 << 20, np.uint8)
        dead: list[float] = []
        weakref.finalize(x, lambda: dead.append(time.perf_counter()))
        with testing.faults("abort:delay=300ms,times=1"):
            work = comms[0].all_reduce(x)
            del x
            await asyncio.sleep(0.02)
            ending = asyncio.ensure_future(comms[0].abort())
            with pytest.raises(AbortedError):
                await work
            del work
            assert not dead  # its communicator is not gone yet, and may still write
            assert await ending == "clean"
            await asyncio.sleep(0.05)
        assert dead
        await abort(comms)


async def test_a_block_that_raises_aborts(temper: str) -> None:
    """A close would wait for peers who may never come."""
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    start = time.perf_counter()
    with pytest.raises(ZeroDivisionError):
        async with comms[0] as comm:
            work = comm.all_reduce(np.zeros(4))
            await fails()
    assert time.perf_counter() - start < 1
    assert comms[0].state == "closed"
    with pytest.raises(AbortedError):
        await work
    await abort(comms)


async def fails() -> None:
    await asyncio.sleep(0.01)
    1 / 0  # noqa: B018 (it is the division that fails)


async def test_a_block_that_is_cancelled_aborts(temper: str) -> None:
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])

    async def block() -> None:
        async with comms[0] as comm:
            await comm.all_reduce(np.zeros(4))

    task = asyncio.ensure_future(block())
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert comms[0].state == "closed"
    await abort(comms)


async def test_aborting_twice_and_closing_after(temper: str) -> None:
    async with clique(2) as comms:
        comms[0].all_reduce(np.zeros(4))
        assert await asyncio.gather(*(comms[0].abort() for _ in range(3))) == ["clean"] * 3
        await comms[0].close()
        await abort(comms)


async def test_closing_finishes_what_was_issued(temper: str) -> None:
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    xs = arrays(comms)
    with testing.faults("op:delay=50ms"):
        works = reduce_all(comms, xs)
        await asyncio.gather(*(comm.close() for comm in comms))
    assert all(work.done() for work in works)
    assert [x.tolist() for x in xs] == [[3.0] * 4] * 2


@pytest.mark.parametrize("leader", [0, 1], ids=["aborted", "other"])
async def test_a_group_whose_communicator_is_aborted_before_its_turn(
    temper: str, leader: int
) -> None:
    """Nothing of it is issued; the other communicator of the group hears of it and goes on."""
    async with clique(2, warm=True) as firsts, clique(2, warm=True) as others:
        pair = [firsts[0], others[0]] if leader == 0 else [others[0], firsts[0]]
        with testing.faults("call:delay=200ms,name=ncclBroadcast"):
            busy = firsts[0].broadcast(np.zeros(4))  # holds the lane, and the group up
            await asyncio.sleep(0.01)
            with testing.journal() as journal:
                with pynccl.group():
                    works = reduce_all(pair, arrays(pair))
                await asyncio.sleep(0.01)
                await firsts[0].abort()
                mine, other = works if leader == 0 else works[::-1]
                with pytest.raises(AbortedError):
                    await mine
                with pytest.raises(pynccl.UsageError, match="another communicator"):
                    await other
                assert not journal.named("ncclAllReduce")
            with pytest.raises(AbortedError):
                await busy
        await abort(firsts)
        await all_reduced(others)


async def test_a_group_is_issued_before_the_close_behind_it(temper: str) -> None:
    for _ in range(20):
        comms = await pynccl.create_all(["cpu:0", "cpu:1", "cpu:2"])
        xs = arrays(comms)
        with pynccl.group() as group:
            reduce_all(comms, xs)
        await asyncio.gather(*(comm.close() for comm in comms))
        await group
        assert xs[0].tolist() == [6.0] * 4


async def test_a_stuck_abort_is_given_up(temper: str) -> None:
    """The handle is abandoned, and counted; the operation has raised long before."""
    before = pynccl.diagnostics()["abandoned_communicators"]
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    with testing.faults("abort:stuck,rank=0"):
        work = comms[0].all_reduce(np.zeros(4))
        assert await comms[0].abort(timeout=0.1) == "abandoned"
        with pytest.raises(AbortedError):
            await work
    await abort(comms[1:])
    assert pynccl.diagnostics()["abandoned_communicators"] >= before
    async with clique(2) as comms:
        await all_reduced(comms)


# ---- those that nobody ends ------------------------------------------------------------------


def run(program: str, *options: str, temper: str = "quick") -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, *options, "-c", program],
        env={
            **os.environ,
            "PYNCCL_HOST_TEMPER": temper,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


MAKE = """
import asyncio, gc, sys, time
import numpy as np
import pynccl

async def made(count=1):
    return await pynccl.create_all([f"cpu:{i}" for i in range(count)])
"""


def test_a_dropped_communicator_warns_once(temper: str) -> None:
    done = run(
        MAKE
        + """
async def main():
    comms = await made()
    await comms[0].all_reduce(np.zeros(4))
    del comms
    gc.collect()
    await asyncio.sleep(0.2)
    counts = pynccl.diagnostics()
    print(counts["communicators"], counts["operations"], counts["abandoned_communicators"])

asyncio.run(main())
""",
        "-Wdefault::ResourceWarning",
        temper=temper,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 0 0\n"
    assert done.stderr.count("ResourceWarning") == 1
    assert "communicator of rank 0 of 1 was not closed; it is aborted" in done.stderr


ENDS = {
    "open": "asyncio.run(made(2)); kept = None",
    "kept": "kept = asyncio.run(made(2))",
    "pending": "kept = asyncio.run(made(2)); work = kept[0].all_reduce(np.zeros(4))",
    "pending, awaited": """
async def main():
    global kept
    kept = await made(2)
    asyncio.ensure_future(waits(kept[0].all_reduce(np.zeros(4))))
    await asyncio.sleep(0.01)
async def waits(work):
    await work
asyncio.run(main())""",
    "exit": "kept = asyncio.run(made(2)); kept[0].barrier(); sys.exit(7)",
    "raise": "kept = asyncio.run(made(2)); kept[0].barrier(); 1 / 0",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_whatever_is_open(temper: str, how: str) -> None:
    """No exit waits for peers; no crash, no hang, nothing printed but what was raised."""
    start = time.perf_counter()
    done = run(MAKE + ENDS[how], "-Wignore", temper=temper)
    assert time.perf_counter() - start < 10
    assert done.returncode == {"exit": 7, "raise": 1}.get(how, 0), done.stderr
    if how == "raise":
        assert "ZeroDivisionError" in done.stderr
    else:
        assert done.stderr == ""


def test_a_forked_child_is_refused(temper: str) -> None:
    done = run(
        MAKE
        + """
import os
comms = asyncio.run(made())
pid = os.fork()
if pid == 0:
    try:
        comms[0].all_reduce(np.zeros(4))
    except pynccl.UsageError as error:
        print("spawn" in str(error), flush=True)
    del comms
    gc.collect()
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
async def main():
    x = np.ones(4)
    await comms[0].all_reduce(x)
    await comms[0].close()
    print(x.sum())
asyncio.run(main())
""",
        temper=temper,
    )
    assert done.stdout == "True\n3\n4.0\n", done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("end", ["close", "abort", "failure"])
async def test_an_ended_communicator_is_no_circle(end: str) -> None:
    """It dies when it is dropped, and not when the collector comes by."""
    gc.disable()
    try:
        comms = await pynccl.create_all(["cpu:0", "cpu:1"])
        await all_reduced(comms)
        dead = [weakref.ref(comm) for comm in comms]
        if end == "failure":
            with pytest.raises(pynccl.DeadlineError):
                await comms[0].barrier(timeout=0.01)
        await asyncio.gather(
            *(comm.close() if end == "close" else comm.abort() for comm in comms)
        )
        comms.clear()
        await asyncio.sleep(0.05)
        assert [ref() for ref in dead] == [None, None]
    finally:
        gc.enable()


# ---- failed, and dropped ---------------------------------------------------------------------


async def expires(comm: Any, call: Callable[[Any], Any]) -> None:
    """An operation for which nobody else comes, as long as it may take."""
    with pytest.raises(pynccl.DeadlineError):
        await call(comm)
    assert comm.state == "failed"


async def waits_alone(comm: Any) -> None:
    await expires(comm, lambda comm: comm.all_reduce(np.zeros(4), timeout=0.05))


async def asks_alone(comm: Any) -> None:
    await expires(comm, lambda comm: comm.all_gather_v(np.zeros((1, 4)), timeout=0.05))


async def waits_with_an_operator(comm: Any) -> None:
    x = np.zeros(4, np.float32)
    op = pynccl.pre_mul_sum(comm, 2.0, "float32")
    await expires(comm, lambda comm: comm.all_reduce(x, op=op, timeout=0.05))


async def has_many(comm: Any) -> None:
    """One is awaited, the others go with it."""
    works = [comm.all_reduce(np.zeros(4)) for _ in range(20)]
    await expires(comm, lambda comm: comm.all_reduce(np.zeros(4), timeout=0.05))
    assert not any(work.exception() is None for work in works)


async def nobody_asks(comm: Any) -> None:
    comm.all_reduce(np.zeros(4), timeout=0.05)
    while comm.state != "failed":
        await asyncio.sleep(0.01)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "fail", [waits_alone, asks_alone, waits_with_an_operator, has_many, nobody_asks]
)
@pytest.mark.parametrize("child", [False, True], ids=["", "child"])
async def test_one_that_has_failed_is_aborted_when_it_is_dropped(
    temper: str, fail: Callable[[Any], Any], child: bool
) -> None:
    """Without a garbage collection: until then its kernel would hold the device."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # nobody asks
    async with clique(2) as comms:
        if child:
            mine, other = await asyncio.gather(*(comm.split(0) for comm in comms))
        else:
            mine, other = await pynccl.create_all(["cpu:0", "cpu:1"])
        gc.collect()
        gc.disable()
        try:
            before = pynccl.diagnostics()["communicators"]
            await fail(mine)
            del mine
            await gone("communicators", before - 1)
            await all_reduced(comms)  # the device is free again
        finally:
            gc.enable()
        await other.abort()


async def test_its_failure_can_be_told_afterwards(temper: str) -> None:
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    works = [comms[0].all_reduce(np.zeros(4), timeout=0.05) for _ in range(2)]
    while not all(work.done() for work in works):
        await asyncio.sleep(0.01)
    await comms[1].abort()
    with pytest.warns(ResourceWarning, match="rank 0 of 2 was not closed"):
        comms.clear()
    while testing.live()["communicators"]:
        await asyncio.sleep(0.002)
    with pytest.raises(pynccl.DeadlineError, match="all_reduce .operation 1, .* rank 0 of 2"):
        await works[0]
    assert "rank 0 of 2" in repr(works[1])
    assert "the deadline passed" in str(works[1].exception())
