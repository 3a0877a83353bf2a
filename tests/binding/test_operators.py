"""pynccl.pre_mul_sum: what its scalars may be, whom it serves, and when it is destroyed."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cliques import abort, all_reduced, arrays, clique, gone

import pynccl
from pynccl import ConfigError, InvalidBufferError, UsageError, pre_mul_sum, testing
from pynccl.types import DTYPES

pytestmark = pytest.mark.usefixtures("no_garbage")


def numpy_type(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


async def reduced(comms: list[Any], xs: list[Any], ops: list[Any]) -> Any:
    works = [c.all_reduce(x, op=op) for c, x, op in zip(comms, xs, ops, strict=True)]
    return (await pynccl.wait(*works))[0]


@pytest.mark.parametrize("dtype", DTYPES)
async def test_each_rank_multiplies_its_own(temper: str, dtype: str) -> None:
    async with clique(2) as comms:
        ops = [pre_mul_sum(comm, comm.rank + 2, dtype) for comm in comms]
        xs = [np.full(3, comm.rank + 1).astype(numpy_type(dtype)) for comm in comms]
        result = await reduced(comms, xs, ops)
        assert result.astype(np.float64).tolist() == [1 * 2 + 2 * 3] * 3
        for op in ops:
            op.close()


async def test_it_serves_every_reduction(temper: str) -> None:
    async with clique(2) as comms:
        ops = [pre_mul_sum(comm, 0.5, "float32") for comm in comms]
        xs = [np.array([2, 4], np.float32) for _ in comms]
        for call, right in (
            (lambda c, x, op: c.all_reduce(x, out=np.zeros_like(x), op=op), [[2, 4], [2, 4]]),
            (lambda c, x, op: c.reduce(x, out=np.zeros_like(x), op=op), [[2, 4], None]),
            (lambda c, x, op: c.reduce_scatter(x, op=op), [[2], [4]]),
        ):
            works = [call(c, x, op) for c, x, op in zip(comms, xs, ops, strict=True)]
            results = await pynccl.wait(*works)
            assert [None if r is None else r.tolist() for r in results] == right
        async with pynccl.group() as group:
            for comm, x, op in zip(comms, xs, ops, strict=True):
                comm.all_reduce(x, op=op)
        assert [r.tolist() for r in await group] == [[2, 4]] * 2


@pytest.mark.parametrize(
    "scalar",
    [
        0.5,
        np.float64(0.5),
        np.float16(0.5),
        np.array([0.5], np.float32),
        ml_dtypes.bfloat16(0.5),
    ],
    ids=lambda scalar: type(scalar).__name__,
)
async def test_numbers_are_read_at_once(temper: str, scalar: Any) -> None:
    async with clique(1) as comms:
        given = scalar.copy() if isinstance(scalar, np.ndarray) else scalar
        op = pre_mul_sum(comms[0], given, "float32")
        if isinstance(given, np.ndarray):
            given[:] = 7
        x = np.array([2, 4], np.float32)
        assert (await comms[0].all_reduce(x, op=op)).tolist() == [1, 2]


async def test_device_memory_is_read_when_it_runs(temper: str) -> None:
    async with clique(1, warm=True) as comms:
        scalar: Any = pynccl.empty(1, "float32", device=comms[0])
        value = np.asarray(scalar)
        value[:] = 1
        op = pre_mul_sum(comms[0], scalar, "float32")
        x = np.ones(2, np.float32)
        await comms[0].all_reduce(x, op=op)
        value[:] = 3
        del scalar, value
        with testing.faults("op:delay=200ms"):
            work = comms[0].all_reduce(x, op=op)
            op.close()
            del op
            gc.collect()
            await asyncio.sleep(0.01)
            # The operation holds the scalar, although its operator is gone.
            assert pynccl.diagnostics()["allocations"] == 1
            assert (await work).tolist() == [3, 3]
        del work
        await gone("allocations")


@pytest.mark.parametrize(
    ("scalar", "dtype", "message"),
    [
        (0.5, "int32", "scalar 0.5 is no integer, and the operator is for int32"),
        (float("nan"), "int32", "is no integer"),
        (300, "uint8", "scalar 300 does not fit into uint8: 0 to 255"),
        (-1, "uint64", "does not fit into uint64"),
        (1e6, "float16", "scalar 1000000.0 does not fit into float16"),
        (1e6, "float8_e4m3fn", "does not fit into float8_e4m3fn"),
        pytest.param(10**400, "float64", "does not fit into float64", id="10**400"),
        (1j, "float32", "scalar must be one real number, not 1j"),
        (True, "float32", "scalar must be one real number, not True"),
        (np.ones(2), "float32", "scalar must be one real number"),
        (1, "int16", "dtype must be one of int8, .*, not int16"),
        (1, "nothing", "dtype must be one of"),
    ],
)
async def test_what_is_no_scalar(scalar: Any, dtype: str, message: str) -> None:
    async with clique(1) as comms:
        with testing.journal() as journal:
            with pytest.raises(ConfigError, match=message):
                pre_mul_sum(comms[0], scalar, dtype)
            assert journal.nccl() == []
        await all_reduced(comms)
    assert pynccl.diagnostics()["operators"] == 0


async def test_what_is_no_scalar_in_device_memory() -> None:
    async with clique(2) as comms:
        two = pynccl.empty(2, "float32", device=comms[0])
        for scalar, message in (
            (two, "scalar has 2 elements, expected one"),
            (pynccl.empty(1, "float64", device=comms[0]), "elements of float64, the operator"),
            (
                pynccl.empty(1, "float32", device=comms[1]),
                "scalar is on cpu:1, this communicator is on host device 0",
            ),
            (object(), "scalar must be an array"),
        ):
            with pytest.raises(InvalidBufferError, match=message):
                pre_mul_sum(comms[0], scalar, "float32")
        await all_reduced(comms)


async def test_whom_it_does_not_serve(temper: str) -> None:
    async with clique(2) as comms:
        (mine, others) = (pre_mul_sum(comm, 2, "float32") for comm in comms)
        x = np.ones(2, np.float32)
        with testing.journal() as journal:
            with pytest.raises(UsageError, match="of another communicator .rank 1 of 2"):
                comms[0].all_reduce(x, op=others)
            with pytest.raises(
                InvalidBufferError, match="for float32, the array has .*float64"
            ):
                comms[0].all_reduce(np.ones(2), op=mine)
            mine.close()
            with pytest.raises(UsageError, match="a pre_mul_sum that has been destroyed"):
                comms[0].all_reduce(x, op=mine)
            with pytest.raises(ConfigError, match="op must be one of sum, .*pre_mul_sum"):
                comms[0].all_reduce(x, op=3)
            assert journal.nccl() == []
        await all_reduced(comms)


async def test_a_group_that_outlives_it(temper: str) -> None:
    async with clique(1) as comms:
        x = np.ones(2, np.float32)
        with pytest.raises(UsageError, match="has been destroyed"):
            async with pynccl.group():
                with pre_mul_sum(comms[0], 2, "float32") as op:
                    comms[0].all_reduce(x, op=op)
                    comms[0].all_reduce(x)
        assert x.tolist() == [1, 1]
        await all_reduced(comms)


@pytest.mark.parametrize("ranks", [1, 2], ids=["inline", "lanes"])
async def test_it_is_destroyed_behind_what_uses_it(temper: str, ranks: int) -> None:
    async with clique(ranks, warm=True) as comms:
        with testing.journal() as journal:
            works = []
            for comm, x in zip(comms, arrays(comms), strict=True):
                with pre_mul_sum(comm, 2, "float32") as op:
                    works.append(comm.all_reduce(x, op=op))
                    works.append(comm.all_reduce(x, op=op))
                works.append(comm.all_reduce(x))
            await pynccl.wait(*works)
            await gone("operators")
            for handle in {call.comm for call in journal.named("ncclAllReduce")}:
                names = [
                    call.function
                    for call in journal.named(
                        "ncclAllReduce", "ncclRedOpCreatePreMulSum", "ncclRedOpDestroy"
                    )
                    if call.comm == handle
                ]
                assert names.count("ncclRedOpCreatePreMulSum") == 1
                assert names[:3] == ["ncclRedOpCreatePreMulSum"] + 2 * ["ncclAllReduce"]
                assert sorted(names[3:]) == ["ncclAllReduce", "ncclRedOpDestroy"]
    assert pynccl.diagnostics()["operators"] == 0


async def test_one_that_was_never_used_costs_nothing(temper: str) -> None:
    async with clique(1) as comms:
        with testing.journal() as journal, pre_mul_sum(comms[0], 2, "float32"):
            pass
        assert journal.nccl() == []


async def test_one_that_is_dropped_is_destroyed(temper: str) -> None:
    async with clique(1) as comms:
        with testing.journal() as journal:
            await comms[0].all_reduce(
                np.ones(2, np.float32), op=pre_mul_sum(comms[0], 2, "float32")
            )
            await gone("operators")
            assert len(journal.named("ncclRedOpDestroy")) == 1


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_what_its_communicator_leaves(temper: str, end: str) -> None:
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    ops = [pre_mul_sum(comm, 2, "float32") for comm in comms]
    await reduced(comms, arrays(comms), ops)
    if end == "abort":
        with testing.faults("op:stuck"):
            works = [
                comm.all_reduce(x, op=op)
                for comm, x, op in zip(comms, arrays(comms), ops, strict=True)
            ]
            ops[1].close()
            await abort(comms)
            assert all(isinstance(w.exception(), pynccl.AbortedError) for w in works)
    else:
        await asyncio.gather(*(comm.close() for comm in comms))
    with pytest.raises(UsageError):
        comms[0].all_reduce(np.ones(2, np.float32), op=ops[0])
    with pytest.raises(UsageError):
        pre_mul_sum(comms[0], 1, "float32")
    ops[0].close()
    ops.clear()
    del comms
    gc.collect()
    await gone("operators")
