"""comm.register: what is registered, once for each allocation, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from cliques import abort, all_reduced, clique, gone, reduce_all

import pynccl
from pynccl import InvalidBufferError, UsageError, testing

pytestmark = pytest.mark.usefixtures("no_garbage")

CALLS = ("ncclCommRegister", "ncclCommDeregister")


def memory(comms: list[Any], count: int = 8) -> list[Any]:
    xs = [pynccl.empty(count, device=comm) for comm in comms]
    for comm, x in zip(comms, xs, strict=True):
        np.asarray(x)[:] = comm.rank + 1
    return xs


@pytest.mark.parametrize("ranks", [1, 2])
async def test_for_the_length_of_a_block(temper: str, ranks: int) -> None:
    async with clique(ranks) as comms:
        xs = memory(comms)
        with testing.journal() as journal:
            async with comms[0].register(xs[0]) as registration:
                assert (registration.nbytes, registration.offset) == (32, 0)
                assert repr(registration) == "<Registration of 32 bytes, open>"
                await pynccl.wait(*reduce_all(comms, xs))
            assert repr(registration) == "<Registration of 32 bytes, closed>"
        names = journal.nccl()
        assert names == ["ncclCommRegister", *["ncclAllReduce"] * ranks, "ncclCommDeregister"]
        assert np.asarray(xs[0])[0] == sum(range(1, ranks + 1))
        await registration.close()  # once more does nothing


async def test_once_for_each_allocation(temper: str) -> None:
    async with clique(1) as comms:
        (x,) = memory(comms)
        torch = pytest.importorskip("torch", reason="no torch: waits for PyTorch")
        with testing.journal() as journal:
            first = comms[0].register(x[2:])
            second = comms[0].register(x)
            third = comms[0].register(torch.from_dlpack(x)[4:])
            assert [await r for r in (third, second, first)] == [third, second, first]
            assert [r.offset for r in (first, second, third)] == [8, 0, 16]
            assert [r.nbytes for r in (first, second, third)] == [32] * 3
            assert journal.nccl() == ["ncclCommRegister"]
            await first.close()
            await third.close()
            assert pynccl.diagnostics()["registrations"] == 1
            await second.close()
            assert journal.nccl() == ["ncclCommRegister", "ncclCommDeregister"]
            async with comms[0].register(x):
                assert len(journal.named("ncclCommRegister")) == 2


async def test_other_libraries_memory(temper: str) -> None:
    async with clique(1) as comms:
        x = np.ones(64, np.float32)
        async with comms[0].register(x) as whole, comms[0].register(x[16:]) as part:
            assert (whole.nbytes, whole.offset) == (256, 0)
            assert (part.nbytes, part.offset) == (256, 64)
            assert pynccl.diagnostics()["registrations"] == 1


async def test_what_cannot_be_registered() -> None:
    async with clique(2) as comms:
        with testing.journal() as journal:
            for buffer, message in (
                (np.ones((4, 4))[:, 1], "buffer must be contiguous"),
                (np.ones(0), "buffer has no bytes"),
                ([1, 2], "buffer must be an array"),
                (pynccl.empty(4, device=comms[1]), "buffer is on cpu:1"),
            ):
                with pytest.raises(InvalidBufferError, match=message):
                    comms[0].register(buffer)
            assert [name for name in journal.nccl() if name != "ncclMemAlloc"] == []
        await all_reduced(comms)


async def test_operations_on_it_go_through_the_lane(temper: str) -> None:
    """Another algorithm may be chosen for it, whose first use waits for the peers."""
    async with clique(1, warm=True) as comms:
        x, y = memory(comms) + memory(comms)
        await comms[0].all_reduce(x)
        with testing.journal() as journal:
            async with comms[0].register(x):
                for array in (y, x, x[3:], y):
                    await comms[0].all_reduce(array, out=array)
                async with pynccl.group():
                    comms[0].all_reduce(x)
            await comms[0].all_reduce(x)
        inline = [call.thread for call in journal.named("ncclAllReduce")]
        mine = inline[-1]
        assert [thread == mine for thread in inline] == [True, False, False, True, False, True]


async def test_it_holds_its_buffer_and_no_longer(temper: str) -> None:
    async with clique(1) as comms:
        x: Any = np.ones(64, np.float32)
        alive = weakref.ref(x)
        registration = await comms[0].register(x)
        del x
        assert alive() is not None
        await registration.close()
        await asyncio.sleep(0.03)
        assert alive() is None
        del registration


async def test_it_ends_behind_what_uses_it(temper: str) -> None:
    async with clique(2, warm=True) as comms:
        xs = memory(comms)
        with testing.journal() as journal:
            registrations = [comm.register(x) for comm, x in zip(comms, xs, strict=True)]
            with testing.faults("op:delay=30ms"):
                works = reduce_all(comms, xs)
                await asyncio.gather(*(r.close() for r in registrations))
                assert all(work.done() for work in works)
        for handle in {call.comm for call in journal.named("ncclAllReduce")}:
            names = [
                c.function
                for c in journal.calls
                if c.comm == handle and c.function in ("ncclAllReduce", *CALLS)
            ]
            assert names == ["ncclCommRegister", "ncclAllReduce", "ncclCommDeregister"]


async def test_beside_a_running_collective(temper: str) -> None:
    """One rank registers while its collective waits for the other, who registers first."""
    async with clique(2, warm=True) as comms:
        xs, ys = memory(comms), memory(comms)
        await pynccl.wait(*reduce_all(comms, xs))
        waiting = comms[0].all_reduce(xs[0])
        first = await asyncio.wait_for(comms[0].register(ys[0]), 5)
        second = await asyncio.wait_for(comms[1].register(ys[1]), 5)
        await pynccl.wait(waiting, comms[1].all_reduce(xs[1]))
        await asyncio.gather(first.close(), second.close())


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_what_is_left_goes_with_the_communicator(temper: str, end: str) -> None:
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    xs: Any = memory(comms)
    left = [await comm.register(x) for comm, x in zip(comms, xs, strict=True)]
    with testing.journal() as journal:
        if end == "abort":
            with testing.faults("op:stuck"):
                works = reduce_all(comms, xs)
                await asyncio.sleep(0.02)
                await abort(comms)
            assert all(isinstance(w.exception(), pynccl.AbortedError) for w in works)
            works.clear()
        else:
            await asyncio.gather(*(comm.close() for comm in comms))
        calls = journal.named(*CALLS)
    assert len(calls) == (2 if end == "close" else 0)
    xs.clear()
    await gone("registrations")
    for registration in left:
        await registration.close()
    with pytest.raises(UsageError):
        comms[0].register(np.ones(4))
    await gone("allocations")


async def test_a_communicator_that_is_dropped_with_one(temper: str) -> None:
    """A registration keeps no communicator alive: who forgets it hears of it, and no more."""
    (comm,) = await pynccl.create_all(["cpu:0"])
    await comm.register(np.ones(4))
    comms = [comm]
    del comm
    with pytest.warns(ResourceWarning, match="was not closed"):
        comms.clear()
    await gone("registrations")


async def test_a_failure_leaves_nothing(temper: str) -> None:
    async with clique(1) as comms:
        x: Any = np.ones(4, np.float32)
        alive = weakref.ref(x)
        with testing.faults("call:fail=4,name=ncclCommRegister,times=1"):
            registration = comms[0].register(x)
            with pytest.raises(pynccl.ConfigError, match=r"register .*ncclCommRegister"):
                await registration
        await registration.close()
        del registration, x
        gc.collect()
        await asyncio.sleep(0.03)
        assert alive() is None
        await all_reduced(comms)


async def test_a_deadline(temper: str) -> None:
    comms = await pynccl.create_all(["cpu:0"])
    x: Any = np.ones(4, np.float32)
    alive = weakref.ref(x)
    with testing.faults("call:delay=200ms,name=ncclCommRegister"):
        with pytest.raises(pynccl.DeadlineError, match="register"):
            await comms[0].register(x, timeout=0.02)
        del x
        gc.collect()
        assert alive() is not None  # a call may still be in it
        await abort(comms)
    gc.collect()
    await asyncio.sleep(0.03)
    assert alive() is None
    assert pynccl.diagnostics()["registrations"] == 0
