"""Order between an operation and its arrays' libraries: what they are told, what we see to."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensors
from foreign_stream import THREAD_LOCAL, Capture
from on_gpu import Interface, Orderly, Stream, gpus, on
from tensors import CUDA, MANAGED, ROCM, Versioned

import pynccl
from pynccl import InvalidBufferError, UsageError, testing

pytestmark = [pytest.mark.usefixtures("on_gpu"), pytest.mark.timeout(20)]
SLOW_CALL = "call:stuck=50ms,name=ncclAllReduce,rank=0,times=1"
OPTIONS: dict[str, Any] = {"max_version": (1, 1), "copy": False}


@pytest.fixture(autouse=True)
def legacy_default() -> Iterator[None]:
    """Leave the table with the legacy default stream as its current one."""
    yield
    tensors.current_stream(None)


def ones(device: int = 0, kind: type[Any] = Versioned) -> Any:
    return on(device, np.ones(4, np.float32), kind)


# ---- what __dlpack__ is told -----------------------------------------------------------------


async def test_the_stream_on_which_it_runs(temper: str) -> None:
    async with gpus(1) as (comm,):
        x, out = ones(), ones()
        with testing.journal() as journal:
            await comm.all_reduce(x, out=out)
        (call,) = journal.named("ncclAllReduce")
        assert call.stream > 2
        assert x.asked == out.asked == [{"stream": call.stream, **OPTIONS}]


@pytest.mark.parametrize(("passed", "told"), [(0, 1), (1, 1), (2, 2), ("handle", "handle")])
async def test_the_callers_stream_is_the_one(temper: str, passed: Any, told: Any) -> None:
    async with gpus(1) as (comm,):
        with Stream() as stream:
            handle = {"handle": stream.handle}
            x, out = ones(), ones()
            await comm.all_reduce(x, out=out, stream=handle.get(passed, passed))
            expected = [{"stream": handle.get(told, told), **OPTIONS}]
            assert x.asked == out.asked == expected


async def test_without_sync_it_is_told_so() -> None:
    async with gpus(1) as (comm,):
        x = ones()
        await comm.all_reduce(x, sync=False)
        with Stream() as stream:
            await comm.all_reduce(x, stream=stream, sync=False)
        assert [asked["stream"] for asked in x.asked] == [-1, -1]


async def test_jax_takes_every_number_for_a_handle() -> None:
    """XLA waits on whatever stream it is given: -1 would be an invalid handle."""
    kind = type("ArrayImpl", (Versioned,), {"__module__": "jaxlib._jax"})
    async with gpus(1) as (comm,):
        x, out = ones(kind=kind), ones()
        with testing.journal() as journal:
            await comm.all_gather(x, out=out, sync=False)
        (call,) = journal.named("ncclAllGather")
        assert x.asked[0]["stream"] == call.stream
        assert out.asked[0]["stream"] == -1


@pytest.mark.parametrize("kind", [tensors.Uncopied, tensors.Old])
async def test_older_libraries_are_told_too(kind: type[Any]) -> None:
    async with gpus(1) as (comm,):
        x = ones(kind=kind)
        await comm.all_reduce(x)
        assert x.asked[0]["stream"] > 2


async def test_a_library_that_takes_no_stream() -> None:
    """It could not put itself in order."""
    async with gpus(1) as (comm,):
        with pytest.raises(InvalidBufferError, match="cannot be taken by DLPack from Oldest"):
            comm.all_reduce(ones(kind=tensors.Oldest))


ODD_DEVICES: dict[str, Callable[[Any], Any]] = {
    "one number": lambda _: (CUDA,),
    "None": lambda _: None,
    "words": lambda _: ("cuda", 0),
    "raising": lambda x: x.nothing,
}


@pytest.mark.parametrize("name", ODD_DEVICES)
async def test_an_odd_device(name: str) -> None:
    kind = type("Odd", (Versioned,), {"__dlpack_device__": ODD_DEVICES[name]})
    async with gpus(1) as (comm,):
        x = ones(kind=kind)
        message = "x's __dlpack_device__.. cannot be"
        with testing.journal() as journal, pytest.raises(InvalidBufferError, match=message):
            comm.all_reduce(x)
        assert journal.calls == []
        assert x.asked == []


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((tensors.CPU, 0), "x is in host memory, but this communicator is on a CUDA device"),
        ((tensors.CUDA_HOST, 0), "x is in host memory"),
        ((CUDA, 1), "x is on cuda:1, this communicator is on cuda:0"),
        ((ROCM, 0), "x is on DLPack device type 10, this communicator is on cuda:0"),
    ],
)
async def test_memory_elsewhere(place: tuple[int, int], message: str) -> None:
    async with gpus(1) as (comm,):
        x = Versioned(np.ones(4, np.float32), device_type=place[0], device_id=place[1])
        issued = comm.issued
        with pytest.raises(InvalidBufferError, match=message):
            comm.all_reduce(x)
        assert comm.issued == issued
        assert tensors.none_held()
        await comm.all_reduce(ones())


async def test_managed_memory_is_everywhere() -> None:
    """DLPack numbers it 0 whatever the device."""
    async with gpus(2) as comms:
        xs = [Versioned(np.ones(2, np.float32), device_type=MANAGED) for _ in comms]
        await pynccl.wait(*(c.all_reduce(x) for c, x in zip(comms, xs, strict=True)))
        assert xs[1].array.tolist() == [2, 2]
        assert xs[1].asked[0]["stream"] > 2


async def test_deferred_operations_have_a_stream_aside(temper: str) -> None:
    """What is still in the lane must not come behind a producer: it may wait for it."""
    async with gpus(2) as comms:
        with Stream() as stream, testing.faults(SLOW_CALL):
            kind = type("Mine", (Orderly,), {"stream": stream})
            first, second = ones(), ones(kind=kind)
            works = [comms[0].all_reduce(first)]
            works[0].order(stream)
            with testing.journal() as journal:
                works.append(comms[0].all_reduce(second))
                works += [comms[1].all_reduce(ones(1)) for _ in range(2)]
                await asyncio.wait_for(pynccl.wait(*works), 10)
            (told,) = (asked["stream"] for asked in second.asked)
            mine = [c for c in journal.named("ncclAllReduce") if c.rank == 0]
            assert told not in {call.stream for call in mine}
            marks = {c.object for c in journal.named("cuEventRecord") if c.stream == told}
            waits = [
                c
                for c in journal.named("cuStreamWaitEvent")
                if c.object in marks and c.stream == mine[-1].stream
            ]
            assert waits
            assert waits[-1].time_ns <= mine[-1].time_ns
            assert second.array.tolist() == [2] * 4


async def test_a_producers_stream_that_is_captured_is_refused(temper: str) -> None:
    """Waiting for it would make the operation a part of somebody's graph."""
    async with gpus(1) as (comm,):
        with Stream() as stream, stream.memory([1.0] * 4) as array:
            x = Interface(array, stream=stream.handle)
            issued, capture = comm.issued, Capture(stream)
            with capture.going_on(THREAD_LOCAL):
                with pytest.raises(
                    UsageError, match="stream of an array's library is being capt"
                ):
                    comm.all_reduce(x)
                tensors.current_stream(stream.handle)
                with pytest.raises(
                    UsageError, match="stream of an array's library is being capt"
                ):
                    comm.all_reduce(ones(kind=tensors.table_type()))
            assert capture.code == 0
            assert comm.issued == issued
            await comm.all_reduce(x)


async def test_what_cannot_be_written_gets_memory_of_the_gpu(
    temper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JAX takes its results there: by DLPack, where the operation has written them."""
    shown = {"shape": (4,), "dtype": np.dtype(np.float32), "__module__": "jaxlib._jax"}
    kind = type("ArrayImpl", (Versioned,), shown)
    taken: list[Any] = []
    jax = types.ModuleType("jax")
    jax.dlpack = types.SimpleNamespace(from_dlpack=lambda x: taken.append(x) or x)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", jax)
    async with gpus(1) as (comm,):
        with testing.journal() as journal:
            work = comm.all_reduce(on(0, np.arange(4, dtype=np.float32), kind))
            result = await work
        assert taken == [result]
        assert result.__dlpack_device__() == (CUDA, 0)
        assert (result.shape, result.dtype) == ((4,), "float32")
        assert ctypes.string_at(result.ptr, 16) == np.arange(4, dtype=np.float32).tobytes()
        assert len(journal.named("cuMemAlloc_v2")) == 1


async def test_the_fault_that_the_stream_aside_guards_against() -> None:
    """Behind its own communicator's stream the producer would wait for ever."""
    async with gpus(2) as comms:
        with testing.journal() as journal:
            await pynccl.wait(*(c.all_reduce(ones(c.rank)) for c in comms))
        own = next(c.stream for c in journal.named("ncclAllReduce") if c.rank == 0)
        with Stream() as stream, testing.faults(SLOW_CALL):
            works = [comms[0].all_reduce(ones(), timeout=0.5)]
            works[0].order(stream)
            stream.go_before(own)
            works.append(comms[0].all_reduce(ones(), timeout=0.5))
            works += [comms[1].all_reduce(ones(1), timeout=0.5) for _ in range(2)]
            with pytest.raises(pynccl.DeadlineError):
                await works[0]
            await asyncio.gather(*(comm.abort() for comm in comms))
            for work in works:
                assert work.exception() is not None


# ---- tables: we see to the order -------------------------------------------------------------


def late(array: Any, value: float) -> None:
    time.sleep(0.03)
    array.fill(value)


async def in_order(
    comms: list[Any], streams: list[Stream], operate: Callable[[int, Any], Any], kind: type[Any]
) -> None:
    """Kernels that write late before, and one that reads behind, with no host wait."""
    seen: list[list[float]] = [[] for _ in comms]
    xs, works = [], []
    for rank, stream in enumerate(streams):
        x = on(rank, np.zeros(4, np.float32), kind)
        tensors.current_stream(stream.handle)
        stream.launch(lambda x=x, rank=rank: late(x.array, rank + 1.0))
        works.append(operate(rank, x))
        xs.append(x)
        stream.launch(lambda rank=rank, x=x: seen[rank].extend(x.array.tolist()))
    await pynccl.wait(*works)
    total = sum(range(1, len(comms) + 1))
    assert [x.array.tolist() for x in xs] == [[total] * 4] * len(comms)
    for stream in streams:
        await asyncio.to_thread(stream.synchronize)
    assert seen == [[total] * 4] * len(comms)


@pytest.mark.parametrize("ranks", [1, 2], ids=["inline", "lanes"])
@pytest.mark.parametrize("passed", ["nothing", "another stream", "current"])
async def test_a_table_is_put_in_order(temper: str, ranks: int, passed: str) -> None:
    async with gpus(ranks) as comms:
        with Stream(0) as a, Stream(ranks - 1) as b, Stream(0) as c, Stream(ranks - 1) as d:
            others = [c, d]

            def operate(rank: int, x: Any) -> Any:
                stream = {"nothing": None, "another stream": others[rank], "current": "current"}
                return comms[rank].all_reduce(x, stream=stream[passed])

            await in_order(comms, [a, b][:ranks], operate, tensors.table_type())


@pytest.mark.parametrize("ranks", [1, 2], ids=["inline", "lanes"])
async def test_a_group_of_tables(temper: str, ranks: int) -> None:
    """The hand-off is that of the group's end, when the operations are issued."""
    async with gpus(ranks) as comms:
        with Stream(0) as a, Stream(ranks - 1) as b:
            streams = [a, b][:ranks]
            xs = [
                on(rank, np.zeros(4, np.float32), tensors.table_type()) for rank in range(ranks)
            ]
            tensors.current_stream(a.handle)
            if ranks == 2:  # each rank's library has its own
                tensors.current_stream(None)
            group = pynccl.group()
            with group:
                for comm, x in zip(comms, xs, strict=True):
                    comm.all_reduce(x)
                if ranks == 1:
                    streams[0].launch(lambda: late(xs[0].array, 1.0))
            await group
            assert [x.array.tolist() for x in xs] == [[1.0 if ranks == 1 else 0.0] * 4] * ranks


async def test_null_is_the_legacy_default_stream(temper: str) -> None:
    async with gpus(1) as (comm,):
        tensors.current_stream(None)
        with testing.journal() as journal:
            await comm.all_reduce(ones(kind=tensors.table_type()))
        own = journal.named("ncclAllReduce")[0].stream
        marks = [c.object for c in journal.named("cuEventRecord") if c.stream == 1]
        waits = journal.named("cuStreamWaitEvent")
        assert [c.stream for c in waits if c.object in marks] == [own]
        assert [c.stream for c in waits if c.object not in marks] == [1]  # and back again


async def test_without_sync_nothing_is_put_in_order() -> None:
    async with gpus(1) as (comm,):
        with Stream() as stream:
            tensors.current_stream(stream.handle)
            with testing.journal() as journal:
                await comm.all_reduce(ones(kind=tensors.table_type()), sync=False)
            assert {c.stream for c in journal.named("cuEventRecord")} == {
                c.stream for c in journal.named("ncclAllReduce")
            }
            assert journal.named("cuStreamWaitEvent") == []


@pytest.mark.parametrize("ranks", [1, 2], ids=["inline", "lanes"])
async def test_two_libraries_in_one_operation(temper: str, ranks: int) -> None:
    """The input's stream and the output's: both before, both behind."""
    async with gpus(ranks) as comms:
        seen: list[float] = []
        with Stream() as first, Stream() as second, second.memory([9.0] * 4) as memory:
            tensors.current_stream(first.handle)
            x = on(0, np.zeros(4, np.float32), tensors.table_type())
            out = Interface(memory, stream=second.handle)
            first.launch(lambda: late(x.array, 5.0))
            second.launch(lambda: late(memory, 7.0))
            works = [comms[0].all_reduce(x, out=out)]
            second.launch(lambda: seen.extend(memory.tolist()))
            if ranks == 2:
                tensors.current_stream(None)
                works.append(comms[1].all_reduce(ones(1, tensors.table_type())))
            await pynccl.wait(*works)
            await asyncio.to_thread(second.synchronize)
            assert seen == memory.tolist() == [5.0 + (ranks - 1)] * 4


async def test_current_is_the_librarys_own(temper: str) -> None:
    async with gpus(1) as (comm,):
        with Stream() as stream:
            tensors.current_stream(stream.handle)
            x = ones(kind=tensors.table_type())
            with testing.journal() as journal:
                await comm.all_reduce(x, stream="current")
            assert {c.stream for c in journal.named("ncclAllReduce")} == {stream.handle}
            assert journal.named("cuStreamWaitEvent") == []  # in order already
            with pytest.raises(UsageError, match='stream="current" is not known'):
                comm.all_reduce(ones(), stream="current")


async def test_cupys_current_stream_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no table: it is told a stream, and gets the operation's order back on its own."""
    import sys
    import types

    with Stream() as stream:
        cupy: Any = types.ModuleType("cupy")
        cupy.cuda = types.SimpleNamespace(
            get_current_stream=lambda: types.SimpleNamespace(ptr=stream.handle)
        )
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        kind = type("ndarray", (Versioned,), {"__module__": "cupy._core.core"})
        async with gpus(1) as (comm,):
            x = ones(kind=kind)
            with testing.journal() as journal:
                await comm.all_reduce(x)
            own = journal.named("ncclAllReduce")[0].stream
            assert x.asked[0]["stream"] == own
            assert journal.named("cuStreamWaitEvent")[-1].stream == stream.handle
            with testing.journal() as journal:
                await comm.all_reduce(x, stream="current")
            assert journal.named("ncclAllReduce")[0].stream == stream.handle
