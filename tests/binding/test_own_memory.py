"""pynccl.empty: arrays in NCCL's memory, how others see them, and when they are freed."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm_ffi
from cliques import abort, all_reduced, clique, gone
from dlpack_producer import Tensor, Versioned

import pynccl
from pynccl import Array, ConfigError, InvalidBufferError, testing
from pynccl._native.memory import TYPES

pytestmark = pytest.mark.usefixtures("no_garbage")


def filled(values: list[float], **options: Any) -> Array:
    x = pynccl.empty(len(values), **options)
    np.asarray(x)[:] = values
    return x


def of_numpy(x: Any) -> tuple[int, str, tuple[int, ...]]:
    return x.ctypes.data, x.dtype.name, x.shape


def by_numpy(x: Array) -> tuple[int, str, tuple[int, ...]]:
    return of_numpy(np.from_dlpack(x))


def by_buffer(x: Array) -> tuple[int, str, tuple[int, ...]]:
    return of_numpy(np.asarray(x))


def by_torch(x: Array) -> tuple[int, str, tuple[int, ...]]:
    torch = pytest.importorskip("torch", reason="no torch: waits for PyTorch")
    t = torch.from_dlpack(x)
    return t.data_ptr(), str(t.dtype).removeprefix("torch."), tuple(t.shape)


def by_jax(x: Array) -> tuple[int, str, tuple[int, ...]]:
    import jax

    j = jax.dlpack.from_dlpack(x)
    return j.unsafe_buffer_pointer(), j.dtype.name, j.shape


def by_strict(x: Array) -> tuple[int, str, tuple[int, ...]]:
    import array_api_strict

    return of_numpy(np.asarray(array_api_strict.from_dlpack(x)))


def by_exchange_api(x: Array) -> tuple[int, str, tuple[int, ...]]:
    t = tvm_ffi.from_dlpack(x)
    return of_numpy(np.from_dlpack(t))


NUMPYS = [name for name, (_, _, text) in TYPES.items() if text is not None]
CONSUMERS: dict[Callable[[Array], tuple[int, str, tuple[int, ...]]], list[str]] = {
    by_numpy: NUMPYS,
    by_buffer: NUMPYS,
    by_exchange_api: ["float32", "int64", "uint8"],
    by_torch: [*NUMPYS, "bfloat16", "float8_e4m3fn", "float8_e5m2"],
    by_jax: ["float32", "int32", "bool", "complex64", "bfloat16"],
    by_strict: ["float32", "int64", "complex128"],
}


@pytest.mark.parametrize("look", CONSUMERS, ids=lambda look: look.__name__)
def test_every_library_takes_it_without_a_copy(
    look: Callable[[Array], tuple[int, str, tuple[int, ...]]],
) -> None:
    for dtype in CONSUMERS[look]:
        x = pynccl.empty((3, 16), dtype, device="cpu")
        assert look(x) == (x.ptr, dtype, (3, 16))
        if look is by_jax and x[1:].ptr % 64:
            continue  # XLA copies what is not aligned to 64 bytes
        assert look(x[1:]) == (x.ptr + 16 * x.itemsize, dtype, (2, 16))


@pytest.mark.parametrize("dtype", TYPES)
def test_what_it_says_of_itself(dtype: str) -> None:
    x = pynccl.empty((3, 5), dtype, device="cpu:1")
    known = dtype in NUMPYS
    size = np.dtype(dtype if known else getattr(ml_dtypes, dtype)).itemsize
    assert (x.dtype, x.shape, x.ndim, x.size, len(x)) == (dtype, (3, 5), 2, 15, 3)
    assert (x.itemsize, x.nbytes, x.device) == (size, 15 * size, "cpu:1")
    assert f"{dtype} (3, 5) on cpu:1 at {x.ptr:#x}" in repr(x)
    assert not hasattr(x, "__cuda_array_interface__")
    if not known:
        with pytest.raises(BufferError, match=f"no format for {dtype}; use DLPack"):
            memoryview(x)


def test_types_of_every_library_are_understood() -> None:
    torch = pytest.importorskip("torch", reason="no torch: waits for PyTorch")
    for dtype, name in [
        (torch.bfloat16, "bfloat16"),
        (np.int16, "int16"),
        ("f8", "float64"),
        (np.dtype("complex64"), "complex64"),
        (ml_dtypes.float8_e5m2, "float8_e5m2"),
        (float, "float64"),
    ]:
        assert pynccl.empty(1, dtype, device="cpu").dtype == name


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (-1, "float32", r"shape must not be negative, but is \(-1,\)"),
        ((2, 1.5), "float32", r"shape must be integers, not \(2, 1.5\)"),
        ("12", "float32", "shape must be integers, not '12'"),
        (4, "float31", "dtype must be one of bool, int8, .*, not 'float31'"),
        (4, object, "dtype must be one of"),
        ((1 << 40, 1 << 40), "int8", "has 1208925819614629174706176 bytes"),
    ],
)
def test_what_cannot_be_made(shape: Any, dtype: Any, message: str) -> None:
    with testing.journal() as journal, pytest.raises(ConfigError, match=message):
        pynccl.empty(shape, dtype, device="cpu")
    assert journal.named("ncclMemAlloc") == []
    assert pynccl.empty((), device="cpu").shape == ()


def test_more_than_there_is() -> None:
    with pytest.raises(
        pynccl.CudaError, match="2251799813685248 bytes on host device 0: ncclMemAlloc"
    ):
        pynccl.empty(1 << 51, "int8", device="cpu")
    assert pynccl.diagnostics()["allocations"] == 0


def test_rows() -> None:
    x = pynccl.empty((4, 3), "int32", device="cpu")
    values = np.asarray(x)
    values[:] = np.arange(12).reshape(4, 3)
    assert np.asarray(x[1:3]).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert np.asarray(x[-1]).tolist() == [9, 10, 11]
    assert x[1:1].shape == (0, 3)
    assert [row.ptr - x.ptr for row in x] == [0, 12, 24, 36]
    for index in (4, -5, slice(0, 4, 2)):
        with pytest.raises(IndexError):
            x[index]
    with pytest.raises(TypeError, match="no length"):
        len(x[0][0])
    empty = pynccl.empty((0, 3), device="cpu")
    assert (empty.nbytes, len(empty), np.asarray(empty).shape) == (0, 0, (0, 3))


# ---- DLPack's rules --------------------------------------------------------------------------


def test_the_version_that_the_consumer_understands() -> None:
    x = pynccl.empty(4, device="cpu")
    for version, name in [
        (None, "dltensor"),
        ((0, 8), "dltensor"),
        ((1, 0), "dltensor_versioned"),
        ((2, 1), "dltensor_versioned"),
    ]:
        assert f'"{name}"' in repr(x.__dlpack__(max_version=version))
    assert x.__dlpack_device__() == (1, 0)
    x.__dlpack__(dl_device=(1, 0), copy=False, stream=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dl_device": (2, 0)}, r"on DLPack device \(1, 0\), not on \(2, 0\)"),
        ({"stream": 1}, "host memory has no stream 1"),
    ],
)
def test_what_it_does_not_export(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BufferError, match=message):
        pynccl.empty(4, device="cpu").__dlpack__(**options)


def test_a_copy_is_one() -> None:
    x = filled([1, 2], device="cpu")
    torch = pytest.importorskip("torch", reason="no torch: waits for PyTorch")
    y = torch.from_dlpack(x, copy=True)
    np.asarray(x)[:] = 0
    assert y.tolist() == [1, 2]
    assert y.data_ptr() != x.ptr


async def test_a_capsule_that_nobody_takes_is_given_back(temper: str) -> None:
    for version in (None, (1, 0)):
        x: Any = pynccl.empty(4, device="cpu")
        capsule = x.__dlpack__(max_version=version)
        del x
        await asyncio.sleep(0.005)
        assert pynccl.diagnostics()["allocations"] == 1
        del capsule
        await gone("allocations")


async def test_tensors_of_the_exchange_api(temper: str) -> None:
    """What a library in C makes through the table becomes an Array, and is taken over."""
    x: Any = filled([1, 2], device="cpu")
    echo = tvm_ffi.get_global_func("testing.echo")
    y = echo(x)
    assert type(y) is Array
    assert (y.ptr, y.shape, y.dtype) == (x.ptr, (2,), "float32")
    del x
    async with clique(1) as comms:
        await comms[0].all_reduce(y)
    del y
    gc.collect()
    await gone("allocations")


async def test_memory_for_a_library_in_c(temper: str) -> None:
    """The table's allocator, which is called without the GIL."""
    pynccl.empty(1, device="cpu")  # now there is an engine to serve from
    set_error = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
    pointer = ctypes.POINTER(Versioned)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    table = get(Array.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    # Behind the version and the pointer to an older table.
    allocate = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.POINTER(Tensor),
        ctypes.POINTER(pointer),
        ctypes.c_void_p,
        set_error,
    )(ctypes.c_void_p.from_address(table + 16).value)
    told: list[tuple[bytes, bytes]] = []
    tell = set_error(lambda _, kind, words: told.append((kind, words)))
    shape = (ctypes.c_int64 * 2)(3, 4)
    like = Tensor(None, 1, 0, 2, 2, 32, 1, shape, None, 0)
    made = pointer()
    assert allocate(like, made, None, tell) == 0
    tensor = made.contents.tensor
    assert (tensor.ndim, tensor.shape[1], tensor.strides[0]) == (2, 4, 4)
    ctypes.memset(tensor.data, 1, 48)
    assert pynccl.diagnostics()["allocations"] >= 1
    delete = ctypes.CFUNCTYPE(None, pointer)(made.contents.deleter)
    delete(made)
    await gone("allocations")
    like.device_type = 10  # ROCm
    assert allocate(like, made, None, tell) == -1
    assert told == [(b"BufferError", b"pynccl has no memory on this device yet")]


# ---- life ------------------------------------------------------------------------------------


async def test_the_last_view_frees_it(temper: str) -> None:
    torch = pytest.importorskip("torch", reason="no torch: waits for PyTorch")
    x: Any = filled([1, 2, 3], device="cpu")
    row, view, buffer = x[2:], torch.from_dlpack(x), memoryview(x)
    del x
    await asyncio.sleep(0.005)
    assert np.asarray(row).tolist() == [3]
    del row
    assert view.tolist() == [1, 2, 3]
    del view
    await asyncio.sleep(0.005)
    assert buffer.tolist() == [1, 2, 3]
    assert pynccl.diagnostics()["allocations"] == 1
    del buffer
    await gone("allocations")


@pytest.mark.parametrize("ranks", [1, 2], ids=["inline", "lanes"])
async def test_an_operation_holds_it(temper: str, ranks: int) -> None:
    """Freed memory is unmapped at once: whoever touched it would crash."""
    async with clique(ranks, warm=True) as comms:
        with testing.faults("op:delay=200ms"), testing.journal() as journal:
            works = [comm.all_reduce(filled([1, 2], device=comm)) for comm in comms]
            for work in works:
                work.out  # noqa: B018 (the Work holds its result as long as it lives)
            del work
            await asyncio.sleep(0.01)
            assert journal.named("ncclMemFree") == []
            results = await pynccl.wait(*works)
            assert np.asarray(results[0]).tolist() == [ranks, 2 * ranks]
            del results
            works.clear()
            await gone("allocations")
        frees = journal.named("ncclMemFree")
        assert len(frees) == ranks
        assert all(free.result == 0 for free in frees)


@pytest.mark.parametrize("ranks", [1, 2], ids=["inline", "lanes"])
async def test_nobody_needs_to_wait_for_the_free(temper: str, ranks: int) -> None:
    async with clique(ranks, warm=True) as comms:
        with testing.faults("op:delay=200ms"):
            for comm in comms:
                comm.all_reduce(filled([1.0], device=comm))
            await asyncio.sleep(0.01)
            assert pynccl.diagnostics()["allocations"] == ranks
            await asyncio.sleep(0.2)
        await gone("allocations")


async def test_a_free_waits_for_the_device_and_nobody_for_it(temper: str) -> None:
    """A native free waits for every kernel, so it is put off until none waits for a peer."""
    async with clique(1, warm=True) as comms:
        x: Any = filled([1.0], device=comms[0])
        with testing.faults("op:stuck"), testing.journal() as journal:
            work = comms[0].all_reduce(np.ones(1, np.float32))
            await asyncio.sleep(0.01)
            del x
            await asyncio.sleep(0.03)
            assert journal.named("ncclMemFree") == []
            await abort(comms)
            await gone("allocations")
            (free,) = journal.named("ncclMemFree")
            assert free.thread != os.getpid()  # not the loop's, which is the process's first
            with pytest.raises(pynccl.AbortedError):
                await work


async def test_an_abort_with_arrays_in_flight(temper: str) -> None:
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    await all_reduced(comms)
    with testing.faults("op:stuck"):
        works = [comm.all_reduce(filled([1, 2], device=comm)) for comm in comms]
        await asyncio.sleep(0.02)
        assert pynccl.diagnostics()["allocations"] == 2
        await abort(comms)
    for work in works:
        assert isinstance(work.exception(), pynccl.AbortedError)
    del work
    works.clear()
    await gone("allocations")


async def test_a_fresh_result_is_an_array_too(temper: str) -> None:
    async with clique(2) as comms:
        xs = [filled([comm.rank, 7], device=comm) for comm in comms]
        results = await pynccl.wait(
            *(comm.all_gather(x) for comm, x in zip(comms, xs, strict=True))
        )
        for comm, result in zip(comms, results, strict=True):
            assert type(result) is Array
            assert result.device == f"cpu:{comm.rank}"
            assert np.asarray(result).tolist() == [0, 7, 1, 7]


async def test_an_array_of_another_device_is_refused(temper: str) -> None:
    async with clique(2) as comms:
        x = filled([1.0], device=comms[0])
        with testing.journal() as journal:
            with pytest.raises(
                InvalidBufferError, match="x is on cpu:0, this communicator is on host device 1"
            ):
                comms[1].all_reduce(x)
            assert journal.nccl() == []
        await all_reduced(comms)


async def test_ordinary_memory(temper: str) -> None:
    with testing.journal() as journal:
        async with clique(1) as comms:
            x: Any = filled([1, 2], device=comms[0], registered=False)
            await comms[0].all_reduce(x)
            del x
            await gone("allocations")
    assert journal.named("ncclMemAlloc", "ncclMemFree") == []
    assert len(journal.named("cuMemFree_v2")) >= 1


OUTLIVES = """
import asyncio, os, sys, threading
import numpy as np, pynccl

kept = []

async def main():
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    xs = [pynccl.empty(1000, device=comm) for comm in comms]
    await pynccl.wait(*(comm.all_reduce(x) for comm, x in zip(comms, xs)))
    kept.append(await comms[0].register(xs[0]))
    kept.extend(xs)
    kept.append(np.from_dlpack(xs[0]))
    await asyncio.gather(*(comm.close() for comm in comms))

asyncio.run(main())
np.asarray(kept[1])[:] = 3
assert kept[-1].tolist() == [3] * 1000
child = os.fork()
if child == 0:
    kept.clear()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert kept[-1].tolist() == [3] * 1000
kept.append(pynccl.empty(10, device="cpu:0"))
del kept[2]
"""


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
def test_arrays_outlive_communicators_loops_and_the_interpreter(temper: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", OUTLIVES],
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
    assert (done.returncode, done.stderr) == (0, "")
