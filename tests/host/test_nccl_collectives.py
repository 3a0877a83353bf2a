"""Every collective of the host engine against the rank-order reference, bit for bit.

Each body runs as threads of one process and as processes, in both tempers.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import nccl_ranks
import numpy as np
import pytest
from nccl_ranks import NcclError, Rank
from support.reference import (
    DTYPES,
    OPS,
    REDUCING,
    Array,
    Op,
    Operation,
    bits,
    combine,
    expected,
    reduced,
    same,
    sample,
)

if TYPE_CHECKING:
    from hostlib import Engine

FLOAT32, BFLOAT16 = 7, 9

OPERATIONS: tuple[Operation, ...] = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
)
NAMES = {
    "all_reduce": "ncclAllReduce",
    "reduce": "ncclReduce",
    "broadcast": "ncclBroadcast",
    "all_gather": "ncclAllGather",
    "reduce_scatter": "ncclReduceScatter",
    "all_to_all": "ncclAlltoAll",
    "gather": "ncclGather",
    "scatter": "ncclScatter",
}
ROOTED = ("reduce", "broadcast", "gather", "scatter")
GUARD = 64
"""Elements around each buffer that nobody may write."""


class Case:
    """One collective on one rank: buffers, the call, and the comparison."""

    def __init__(
        self, rank: Rank, operation: Operation, code: int, count: int, op: Op, in_place: bool
    ) -> None:
        self.rank, self.operation, self.code, self.count = rank, operation, code, count
        self.op, self.in_place = op, in_place
        self.root = (count + code) % rank.ranks
        self.wide_in = operation in ("reduce_scatter", "all_to_all", "scatter")
        self.wide_out = operation in ("all_gather", "all_to_all", "gather")
        self.size_in = count * (rank.ranks if self.wide_in else 1)
        self.size_out = count * (rank.ranks if self.wide_out else 1)
        seeds = [(count, code, OPERATIONS.index(operation), r) for r in range(rank.ranks)]
        self.inputs = [sample(DTYPES[code], self.size_in, seed) for seed in seeds]

    def buffers(self) -> tuple[Array, int, int]:
        """The whole memory, and where in it the send and the receive buffer begin."""
        whole = np.zeros(self.size_in + self.size_out + 3 * GUARD, dtype=DTYPES[self.code])
        bits(whole)[:] = 0x5A
        if not self.in_place:
            return whole, GUARD, 2 * GUARD + self.size_in
        own = self.rank.rank * self.count
        return whole, GUARD + own * self.wide_out, GUARD + own * self.wide_in

    def check(self) -> None:
        """Call, wait, and compare the whole memory: what was to be written, and the rest."""
        rank = self.rank
        whole, send, recv = self.buffers()
        whole[send : send + self.size_in] = self.inputs[rank.rank]
        after = whole.copy()
        wanted = expected(self.operation, self.inputs, self.op, self.root, rank.rank)
        if wanted is not None:
            after[recv : recv + self.size_out] = wanted
        arguments: list[Any] = [whole[send:].ctypes.data, whole[recv:].ctypes.data]
        arguments += [self.count, self.code]
        if self.operation in REDUCING:
            arguments.append(OPS.index(self.op))
        if self.operation in ROOTED:
            arguments.append(self.root)
        rank.must(NAMES[self.operation], *arguments, rank.comm, rank.stream)
        rank.synchronize()
        assert same(whole, after), (
            f"{self.operation} {DTYPES[self.code]} count={self.count} op={self.op} "
            f"root={self.root} in_place={self.in_place} rank={rank.rank} of {rank.ranks}"
        )


def check_all(rank: Rank, operation: Operation, code: int, count: int, op: Op) -> None:
    for in_place in (False, True):
        if not (in_place and operation == "all_to_all"):  # which is not to be called in place
            Case(rank, operation, code, count, op, in_place).check()


def small_sizes(rank: Rank) -> None:
    """Every operation and type, across the sizes that travel in a line and in a slot."""
    for operation in OPERATIONS:
        for code in range(len(DTYPES)):
            for count in (0, 1, 7, 1024):
                check_all(rank, operation, code, count, "avg" if count == 7 else "sum")
    rank.finish()


def operators(rank: Rank) -> None:
    """Every operator on every type."""
    for code in range(len(DTYPES)):
        for op in OPS:
            if not (rank.ranks == 1 and op == "avg" and DTYPES[code].itemsize == 1):
                check_all(rank, "all_reduce", code, 300, op)
                check_all(rank, "reduce_scatter", code, 5, op)
    rank.finish()


def large_sizes(rank: Rank) -> None:
    """Many chunks, the last of them odd."""
    for operation in OPERATIONS:
        Case(rank, operation, FLOAT32, 1_000_003, "sum", operation in ("all_reduce",)).check()
    Case(rank, "all_reduce", BFLOAT16, 1_000_003, "avg", False).check()
    rank.finish()


def layouts(ranks: tuple[int, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("layout", "ranks"),
        [(layout, n) for layout in ("threads", "processes") for n in ranks],
    )


def run(layout: str, engine: Engine, temper: str, ranks: int, body: Any) -> None:
    if layout == "threads":
        nccl_ranks.run_threads(engine, ranks, body)
    else:
        environment = {"PYNCCL_HOST_TEMPER": temper}
        nccl_ranks.run_processes(engine, ranks, body, environment=environment)


@layouts((2, 4))
def test_every_operation_and_type(engine, temper, layout, ranks):
    run(layout, engine, temper, ranks, small_sizes)


@layouts((1, 3))
def test_every_operator(engine, temper, layout, ranks):
    run(layout, engine, temper, ranks, operators)


@layouts((2, 3))
def test_large(engine, temper, layout, ranks):
    run(layout, engine, temper, ranks, large_sizes)


def test_one_rank_moves_everything_too(engine, temper):
    nccl_ranks.run_threads(engine, 1, one_rank)


def one_rank(rank: Rank) -> None:
    """On one rank an 8-bit float has no average, which NCCL refuses."""
    for operation in OPERATIONS:
        for code in range(len(DTYPES)):
            check_all(rank, operation, code, 7, "sum")
    for code in (10, 11):
        with pytest.raises(NcclError) as refused:
            Case(rank, "all_reduce", code, 7, "avg", False).check()
        assert refused.value.code == nccl_ranks.ARGUMENT
    rank.finish()


def scaled(rank: Rank, device_scalar: bool) -> None:
    """Each rank multiplies by its own scalar, in the element type; then comes the sum."""
    engine, n = rank.engine, 11
    for code in (2, 6, 7, 9):
        dtype = DTYPES[code]
        inputs = [sample(dtype, n, (code, r)) for r in range(rank.ranks)]
        scalars = [np.array([r + 2]).astype(dtype) for r in range(rank.ranks)]
        op = ctypes.c_int()
        own = scalars[rank.rank].copy()
        rank.must(
            "ncclRedOpCreatePreMulSum",
            ctypes.byref(op),
            own.ctypes.data,
            code,
            0 if device_scalar else 1,
            rank.comm,
        )
        if not device_scalar:
            bits(own)[:] = 0  # was read at once
        out = np.zeros(n, dtype=dtype)
        source = inputs[rank.rank]
        rank.must(
            "ncclAllReduce",
            source.ctypes.data,
            out.ctypes.data,
            n,
            code,
            op.value,
            rank.comm,
            rank.stream,
        )
        other = 7 if code != 7 else 8
        assert (
            engine.ncclAllReduce(
                source.ctypes.data, out.ctypes.data, n, other, op.value, rank.comm, rank.stream
            )
            == nccl_ranks.ARGUMENT
        )
        rank.must("ncclRedOpDestroy", op.value, rank.comm)
        rank.synchronize()
        products = [premultiplied(x, s) for x, s in zip(inputs, scalars, strict=True)]
        assert same(out, reduced(products, "sum")), (code, rank.rank)
        assert engine.ncclRedOpDestroy(op.value, rank.comm) == nccl_ranks.ARGUMENT
    rank.finish()


def premultiplied(values: Array, scalar: Array) -> Array:
    return combine(values, np.repeat(scalar, values.size), "prod")


@pytest.mark.parametrize("device_scalar", [False, True], ids=["immediate", "device"])
def test_user_operators(engine, temper, device_scalar):
    nccl_ranks.run_threads(engine, 3, scaled, device_scalar)


def premature(rank: Rank) -> None:
    """The operator of one communicator is unknown to another, and to itself once destroyed."""
    scalar = np.array([2.0], dtype=np.float32)
    op = ctypes.c_int()
    rank.must(
        "ncclRedOpCreatePreMulSum", ctypes.byref(op), scalar.ctypes.data, FLOAT32, 1, rank.comm
    )
    twin = ctypes.c_void_p()
    rank.must("ncclCommSplit", rank.comm, 0, rank.rank, ctypes.byref(twin), None)
    x = np.ones(4, dtype=np.float32)
    arguments = (x.ctypes.data, x.ctypes.data, 4, FLOAT32, op.value)
    assert rank.engine.ncclAllReduce(*arguments, twin, rank.stream) == nccl_ranks.ARGUMENT
    assert "unknown" in nccl_ranks.last_error(rank.engine)
    rank.must("ncclCommDestroy", twin)
    rank.finish()


def test_operators_belong_to_their_communicator(engine, temper):
    nccl_ranks.run_threads(engine, 2, premature)
