"""Every array library, by DLPack or the buffer protocol, and results of the caller's own."""

from __future__ import annotations

import array as arraymodule
import asyncio
import ctypes
import sys
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm_ffi
from cliques import all_reduced, clique
from dlpack_producer import CPU, CUDA, Older, Producer

import pynccl
from pynccl import InvalidBufferError, testing

RANKS = 2


def as_numpy(x: Any) -> Any:
    if isinstance(x, Producer):
        return x.array
    return np.from_dlpack(x) if hasattr(x, "__dlpack__") else np.asarray(x)


def producers(kind: type[Producer]) -> Callable[[Any], Any]:
    return lambda values: kind(np.array(values, np.float32))


def tvm(values: Any) -> Any:
    return tvm_ffi.from_dlpack(np.array(values, np.float32))


def torch(values: Any) -> Any:
    library = pytest.importorskip("torch", reason="no torch: waits for PyTorch")
    return library.tensor(values, dtype=library.float32)


LIBRARIES: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda values: np.array(values, np.float32),
    "DLPack 1": producers(Producer),
    "DLPack 0": producers(Older),
    "exchange API": tvm,
    "torch": torch,
    "array.array": lambda values: arraymodule.array("f", values),
    "ctypes": lambda values: (ctypes.c_float * len(values))(*values),
}


async def every_operation(comms: list[Any], made: Callable[[Any], Any]) -> dict[str, list[Any]]:
    """Each operation once on all ranks; the results by rank."""
    one = [made([comm.rank + 1.0, comm.rank + 5.0]) for comm in comms]
    out = [made([0.0, 0.0]) for _ in comms]
    wide = [made([0.0] * 4) for _ in comms]
    calls: dict[str, Callable[[Any, int], Any]] = {
        "all_reduce": lambda c, r: c.all_reduce(one[r], out=out[r]),
        "in place": lambda c, r: c.all_reduce(made([r + 1.0, r + 5.0])),
        "reduce": lambda c, r: c.reduce(one[r], out=made([0.0, 0.0]), root=1),
        "broadcast": lambda c, r: c.broadcast(made([r + 1.0, r + 5.0]), root=1),
        "all_gather": lambda c, r: c.all_gather(one[r], out=wide[r]),
        "reduce_scatter": lambda c, r: c.reduce_scatter(one[r], out=made([0.0])),
        "all_to_all": lambda c, r: c.all_to_all(one[r], out=made([0.0, 0.0])),
        "gather": lambda c, r: c.gather(one[r], out=made([0.0] * 4)),
        "scatter": lambda c, r: c.scatter(one[r], out=made([0.0])),
    }
    results = {}
    for name, call in calls.items():
        results[name] = await pynccl.wait(*(call(comm, comm.rank) for comm in comms))
    inbox = [made([0.0, 0.0]) for _ in comms]
    async with pynccl.group() as group:
        for comm in comms:
            comm.send(one[comm.rank], 1 - comm.rank)
            comm.recv(inbox[comm.rank], 1 - comm.rank)
    results["recv"] = (await group)[1::2]
    assert all(result is x for result, x in zip(results["recv"], inbox, strict=True))
    return results


RIGHT: dict[str, list[Any]] = {
    "all_reduce": [[3, 11]] * 2,
    "in place": [[3, 11]] * 2,
    "reduce": [None, [3, 11]],
    "broadcast": [[2, 6]] * 2,
    "all_gather": [[1, 5, 2, 6]] * 2,
    "reduce_scatter": [[3], [11]],
    "all_to_all": [[1, 2], [5, 6]],
    "gather": [[1, 5, 2, 6], None],
    "scatter": [[1], [5]],
    "recv": [[2, 6], [1, 5]],
}


@pytest.mark.parametrize("library", LIBRARIES)
async def test_every_operation_with_every_library(temper: str, library: str) -> None:
    made = LIBRARIES[library]
    async with clique(RANKS) as comms:
        results = await every_operation(comms, made)
    assert results.keys() == RIGHT.keys()
    for name, right in RIGHT.items():
        for result, values in zip(results[name], right, strict=True):
            assert (result is None) == (values is None), name
            if values is not None:
                assert type(result) is type(made(values))
                assert as_numpy(result).tolist() == values, name


GIVES_RESULTS = ["numpy", "DLPack 1", "DLPack 0", "torch"]


@pytest.mark.parametrize("library", GIVES_RESULTS)
async def test_a_fresh_result_is_of_the_callers_library(temper: str, library: str) -> None:
    made = LIBRARIES[library]
    async with clique(RANKS) as comms:
        xs = [made([[comm.rank + 1.0], [comm.rank + 5.0]]) for comm in comms]
        for operation, shape, right in (
            ("all_gather", (4, 1), [[1, 5, 2, 6]] * 2),
            ("reduce_scatter", (1, 1), [[3], [11]]),
            ("all_to_all", (2, 1), [[1, 2], [5, 6]]),
        ):
            works = [getattr(c, operation)(x) for c, x in zip(comms, xs, strict=True)]
            results = await pynccl.wait(*works)
            for work, result, values in zip(works, results, right, strict=True):
                assert type(result) is type(xs[0])
                assert tuple(result.shape) == shape
                assert work.out is result
                assert as_numpy(result).reshape(-1).tolist() == values


async def test_where_no_result_can_be_made_it_says_so(temper: str) -> None:
    async with clique(RANKS) as comms:
        with pytest.raises(InvalidBufferError, match=r"cannot make a result.*pass out="):
            comms[0].all_gather(tvm([1.0]))
        x = await pynccl.wait(*(c.all_gather(b"ab"[c.rank : c.rank + 1]) for c in comms))
        assert x[0].tolist() == [97, 98]  # what has no library of its own gets a NumPy array
        await all_reduced(comms)


async def test_an_immutable_array_gets_a_fresh_one(
    temper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of JAX: nothing may write into x, and the result is of its type again."""

    class Immutable(Producer):
        pass

    Immutable.__module__ = "jaxlib.planted"
    jax = types.ModuleType("jax")
    jax.dlpack = types.SimpleNamespace(from_dlpack=lambda x: Immutable(np.asarray(x)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", jax)
    async with clique(RANKS) as comms:
        xs = [Immutable(np.full(4, comm.rank + 1.0)) for comm in comms]
        works = [comm.all_reduce(x) for comm, x in zip(comms, xs, strict=True)]
        for work, x in zip(works, xs, strict=True):
            result = await work
            assert type(result) is Immutable
            assert result is not x
            assert result is await work
            assert result.array.tolist() == [3.0] * 4
            assert result.array.ctypes.data % 64 == 0
        assert [x.array[0] for x in xs] == [1.0, 2.0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
async def test_types_that_numpy_does_not_know(temper: str, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    async with clique(RANKS) as comms:
        xs = [np.full((2, 3), comm.rank + 1, kind) for comm in comms]
        works = [comm.all_reduce(x) for comm, x in zip(comms, xs, strict=True)]
        assert dtype in repr(works[0])
        result, _ = await pynccl.wait(*works)
        assert result.dtype == kind
        assert result.astype(np.float32).tolist() == [[3.0] * 3] * 2
        gathered = [comm.all_gather(x) for comm, x in zip(comms, xs, strict=True)]
        assert (await gathered[0]).dtype == kind
        await gathered[1]


async def test_what_can_only_be_moved(temper: str) -> None:
    async with clique(RANKS) as comms:
        for array in (
            np.array([1 + 2j, 3 - 4j], np.complex64),
            np.array([True, False, True]),
            np.array(["2020-01-01", "NaT"], "datetime64[s]"),
            np.array([(1, 2.0)], np.dtype([("a", "i4"), ("b", "f8")])),
            np.array([b"abc", b"de"]),
        ):
            xs = [array.copy(), np.zeros_like(array)]
            work = [comm.broadcast(x) for comm, x in zip(comms, xs, strict=True)]
            result = await work[1]
            await work[0]
            assert result is xs[1]
            assert result.tobytes() == array.tobytes()


# ---- what is borrowed is given back ---------------------------------------------------------


@pytest.mark.parametrize("kind", [Producer, Older])
async def test_a_capsule_is_held_until_the_end_and_no_longer(
    temper: str, kind: type[Producer]
) -> None:
    async with clique(1, warm=True) as comms:
        x = kind(np.ones(4, np.float32))
        with testing.faults("op:delay=50ms"):
            work = comms[0].all_reduce(x)
            assert x.held == 1
            await work
        await asyncio.sleep(0.05)
        assert x.held == 0
        # Host memory has no stream to order by, so none is named.
        newest = {"max_version": (1, 1), "copy": False}
        assert x.asked == ([newest] if kind.versioned else [{}])


async def test_a_refused_capsule_is_given_back(temper: str) -> None:
    async with clique(1) as comms:
        x = Producer(np.ones((4, 4), np.float32)[:, :2])
        with pytest.raises(InvalidBufferError, match="contiguous"):
            comms[0].all_reduce(x)
        assert x.held == 0


async def test_a_buffer_is_exported_until_the_end(temper: str) -> None:
    async with clique(1, warm=True) as comms:
        x = arraymodule.array("f", [1.0, 2.0])
        with testing.faults("op:delay=50ms"):
            work = comms[0].all_reduce(x)
            with pytest.raises(BufferError):
                x.append(3.0)  # would move the memory
            await work
        await asyncio.sleep(0.02)
        x.append(3.0)


async def test_an_offset_counts(temper: str) -> None:
    async with clique(1) as comms:
        memory = np.arange(8, dtype=np.float32)
        x = Producer(memory[4:], offset=16)
        y = np.zeros(4, np.float32)
        await comms[0].all_reduce(x, out=y)
        assert y.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"readonly": True}, "x is read-only"),
        ({"device": (CUDA, 0)}, 'on a device .*host engine.*device="cuda'),
        ({"device": (10, 0)}, "DLPack device type 10"),
        ({"major": 2}, r"x speaks DLPack 2\.1, expected 1.x"),
    ],
    ids=["read-only", "on a GPU", "on ROCm", "of a later version"],
)
async def test_a_tensor_that_does_not_fit(
    temper: str, options: dict[str, Any], message: str
) -> None:
    async with clique(1) as comms:
        x = Producer(np.ones(4, np.float32), **options)
        with testing.journal() as journal, pytest.raises(InvalidBufferError, match=message):
            comms[0].all_reduce(x)
        assert journal.nccl() == []
        assert x.held == 0
        x.place = (CPU, 0)
        await all_reduced(comms)


async def test_a_capsule_that_is_none(temper: str) -> None:
    class Odd:
        def __dlpack_device__(self) -> tuple[int, int]:
            return CPU, 0

        def __dlpack__(self, **_: Any) -> object:
            return object()

    async with clique(1) as comms:
        with pytest.raises(InvalidBufferError, match="no unused DLPack capsule"):
            comms[0].all_reduce(Odd())
        await all_reduced(comms)
