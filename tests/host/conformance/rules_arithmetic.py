"""Sections 10 and 11: reductions, and operators that users make."""

from __future__ import annotations

import ctypes
import math
import struct

import numpy as np

from conformance.rules import Needs, rule
from conformance.trial import (
    ARGUMENT,
    AVG,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT8,
    INT32,
    INT64,
    MAX,
    MIN,
    PROD,
    SUM,
    UINT8,
    UINT32,
    UINT64,
    Rank,
    Trial,
    with_ranks,
)  # fmt: skip

NUMPY = {
    INT8: "i1", UINT8: "u1", INT32: "i4", UINT32: "u4", INT64: "i8", UINT64: "u8",
    FLOAT16: "f2", FLOAT32: "f4", FLOAT64: "f8",
}  # fmt: skip


def reduce(rank: Rank, dtype: int, op: int, *values: float) -> float:
    """All-reduce one element, of which each rank gives its own; what comes out."""
    kind = np.dtype(NUMPY[dtype])
    with np.errstate(over="ignore"):
        mine = np.array(values[rank.rank]).astype(kind)
    data = rank.memory(kind.itemsize, mine.tobytes())
    rank.all_reduce(data, data, 1, dtype=dtype, op=op)
    rank.synchronize()
    out = np.frombuffer(data.read(), dtype=kind)[0].item()
    data.free()
    return out


def cases(trial: Trial, *each: tuple[int, int, tuple[float, ...], float]) -> None:
    """Reductions (type, op, what the ranks give) and what they must come to."""

    def body(rank: Rank) -> None:
        for dtype, op, values, wanted in each:
            found = reduce(rank, dtype, op, *values)
            both_nan = math.isnan(found) and math.isnan(wanted)
            what = f"{NUMPY[dtype]} op {op} of {values}"
            rank.same(what, None if both_nan else found, None if both_nan else wanted)

    with_ranks(trial, len(each[0][2]), body)


@rule("10", "integer sums and products wrap", Needs.DEVICES)
def wraps(trial: Trial) -> None:
    cases(
        trial,
        (INT8, SUM, (100, 100), -56),
        (UINT8, SUM, (200, 100), 44),
        (INT32, SUM, (2**31 - 1, 1), -(2**31)),
        (UINT64, PROD, (2**63, 2), 0),
        (INT64, PROD, (-(2**62), 4), 0),
    )


@rule("10", "integer minima and maxima are exact", Needs.DEVICES)
def extremes(trial: Trial) -> None:
    cases(
        trial,
        (INT8, MIN, (-128, 127), -128),
        (UINT8, MAX, (255, 1), 255),
        (INT64, MAX, (-(2**63), -1), -1),
        (UINT64, MIN, (2**64 - 1, 2**63), 2**63),
    )


@rule(
    "10",
    "an integer average is the wrapped sum, divided with truncation towards zero",
    Needs.DEVICES,
)
def integer_average(trial: Trial) -> None:
    cases(
        trial,
        (INT8, AVG, (100, 100), -28),
        (INT32, AVG, (-3, 0), -1),
        (INT32, AVG, (3, 0), 1),
        (UINT8, AVG, (255, 255), 127),
    )


@rule(
    "10",
    "a float average multiplies each input by 1/n in the element's type, then sums",
    Needs.DEVICES,
)
def float_average(trial: Trial) -> None:
    third = np.float16(1 / 3)
    each = np.float16(np.float16(3) * third)
    wanted = np.float16(np.float16(each + each) + each)
    cases(trial, (FLOAT16, AVG, (3, 3, 3), float(wanted)), (FLOAT64, AVG, (1, 2, 3), 2.0))


@rule("10", "16-bit sums are rounded at every step", Needs.DEVICES)
def half_sums(trial: Trial) -> None:
    # 2048 + 1 is 2048 in half precision, twice; the exact sum would be 2050.
    cases(trial, (FLOAT16, SUM, (2048, 1, 1), 2048.0), (FLOAT16, SUM, (1, 1, 2048), 2050.0))


@rule("10", "a NaN loses to a number in minima and maxima", Needs.DEVICES)
def nans(trial: Trial) -> None:
    cases(
        trial,
        (FLOAT32, MAX, (math.nan, 1.0), 1.0),
        (FLOAT64, MIN, (2.0, math.nan), 2.0),
        (FLOAT32, MIN, (math.nan, math.nan), math.nan),
    )


@rule(
    "10", "ranks sum in their order, so that results do not change from run to run", Needs.HOST
)
def rank_order(trial: Trial) -> None:
    values = (1e8, 1.0, -1e8)
    total = np.float32(0)
    for value in values:
        total = np.float32(total + np.float32(value))
    cases(trial, *[(FLOAT32, SUM, values, float(total))] * 4)


# ---- operators


@rule("11", "an operator is refused by Destroy when built in, unknown, or without communicator")
def destroy_operators(trial: Trial) -> None:
    for op in (SUM, AVG, -3, 77):
        trial.call("ncclRedOpDestroy", op, None, gives=ARGUMENT)


def made(rank: Rank, scalar: float, dtype: int = FLOAT32, residence: int = 1) -> int:
    memory = rank.bytes(8, struct.pack("<f", scalar))
    op = rank.number()
    rank.call("ncclRedOpCreatePreMulSum", ctypes.byref(op), memory, dtype, residence, rank.comm)
    memory.raw = bytes(8)  # it was read by the call
    return op.value


@rule("11", "each rank multiplies its own input by its own scalar, then all sum", Needs.DEVICES)
def premultiplied(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        op = made(rank, 10.0 ** (rank.rank + 1))
        data = rank.memory(4, struct.pack("<f", 1 + rank.rank))
        rank.all_reduce(data, data, 1, dtype=FLOAT32, op=op)
        rank.synchronize()
        rank.same("the sum", struct.unpack("<f", data.read())[0], 210.0)
        rank.call("ncclRedOpDestroy", op, rank.comm)
        data.free()

    with_ranks(trial, 2, body)


@rule("11", "an operator may be destroyed before the group it was used in ends", Needs.DEVICES)
def destroyed_early(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        op = made(rank, 3.0)
        data = rank.memory(4, struct.pack("<f", 1.0))
        rank.call("ncclGroupStart")
        rank.all_reduce(data, data, 1, dtype=FLOAT32, op=op)
        rank.call("ncclRedOpDestroy", op, rank.comm)
        rank.call("ncclGroupEnd")
        rank.synchronize()
        rank.same("the sum", struct.unpack("<f", data.read())[0], 6.0)
        rank.call("ncclRedOpDestroy", op, rank.comm, gives=ARGUMENT)
        data.free()

    with_ranks(trial, 2, body)


@rule("11", "a scalar in device memory is read when the kernel runs", Needs.DEVICES)
def scalar_on_device(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        scalar = rank.memory(4, struct.pack("<f", 1.0))
        op = rank.number()
        rank.call("ncclRedOpCreatePreMulSum", ctypes.byref(op), scalar, FLOAT32, 0, rank.comm)
        scalar.write(struct.pack("<f", 5.0))
        data = rank.memory(4, struct.pack("<f", 1.0))
        rank.all_reduce(data, data, 1, dtype=FLOAT32, op=op.value)
        rank.synchronize()
        rank.same("the sum", struct.unpack("<f", data.read())[0], 10.0)
        rank.call("ncclRedOpDestroy", op.value, rank.comm)
        data.free()
        scalar.free()

    with_ranks(trial, 2, body)


@rule(
    "11",
    "an operator of another type, or of another communicator, is an invalid argument",
    Needs.DEVICES,
)
def foreign_operators(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        op = made(rank, 1.0)
        data = rank.memory(8)
        rank.all_reduce(data, data, 1, dtype=FLOAT64, op=op, gives=ARGUMENT)
        child = rank.pointer()
        rank.call("ncclCommSplit", rank.comm, 0, 0, ctypes.byref(child), None)
        rank.call(
            "ncclAllReduce", data, data, 1, FLOAT32, op, child, rank.stream, gives=ARGUMENT
        )
        rank.call("ncclCommAbort", child)
        rank.call("ncclRedOpDestroy", SUM, rank.comm, gives=ARGUMENT)
        rank.call("ncclRedOpDestroy", op, rank.comm)
        data.free()

    with_ranks(trial, 1, body)
