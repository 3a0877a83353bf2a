"""Arrays that do not fit: the documented exception, nothing issued, and the next call works."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cliques import all_reduced, clique

from pynccl import InvalidBufferError, testing


def frozen(x: Any) -> Any:
    x.flags.writeable = False
    return x


def records() -> Any:
    """Rows that hold a Python object beside a number."""
    return np.zeros(4, np.dtype([("key", "O"), ("value", "f4")]))


def crossed(kind: str) -> tuple[Any, Any]:
    """Two views of one array that overlap, other than NCCL's in place."""
    whole = np.zeros(12, np.float32)
    return {
        "ahead": (whole[:8], whole[4:12]),
        "behind": (whole[4:12], whole[:8]),
        "wrong block": (whole[4:8], whole[:8]),
        "half a block": (whole[2:6], whole[:8]),
    }[kind]


FLOATS = np.zeros(8, np.float32)

# What is called on rank 0 of two, and what the message must say: what was wrong, what is right.
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "complex product": (
        lambda c: c.all_reduce(np.zeros(4, np.complex64), op="prod"),
        "op 'prod' is not for complex64, which reduces with sum and avg only",
    ),
    "complex of long doubles": (
        lambda c: c.all_reduce(np.zeros(4, np.clongdouble)),
        "complex256 can be moved but not reduced",
    ),
    "bool sum": (
        lambda c: c.all_reduce(np.zeros(4, bool)),
        "op 'sum' is not for bool, which reduces with any, all, max, min only",
    ),
    "any of numbers": (
        lambda c: c.all_reduce(FLOATS, op="any"),
        "op 'any' is for bool only, not for float32, which reduces with sum, prod, max, min",
    ),
    "all of what cannot be reduced": (
        lambda c: c.all_reduce(np.zeros(4, np.int16), op="all"),
        "int16 can be moved but not reduced",
    ),
    "int16 sum": (lambda c: c.reduce_scatter(np.zeros(4, np.int16)), "int16 can be"),
    "fp8 of a kind that NCCL has not": (
        lambda c: c.all_reduce(np.zeros(4, ml_dtypes.float8_e4m3fnuz)),
        "float8_e4m3fnuz can be moved but not reduced",
    ),
    "dates": (
        lambda c: c.all_reduce(np.zeros(4, "datetime64[s]")),
        r"datetime64\[s\] can be moved but not reduced",
    ),
    "records": (
        lambda c: c.all_reduce(np.zeros(4, np.dtype([("a", "i4"), ("b", "f8")]))),
        r"'a'.*'b'.* can be moved but not reduced",
    ),
    "characters": (
        lambda c: c.all_reduce((ctypes.c_char * 4)()),
        r"buffer format '<?c' can be moved",
    ),
    "numbers of the other byte order": (
        lambda c: c.all_reduce(np.zeros(4, np.dtype(np.float32).newbyteorder())),
        "[<>]f4 can be moved but not reduced",
    ),
    "objects": (lambda c: c.broadcast(np.array([1, "a"], object)), r"dtype object.*objects"),
    "objects in records": (lambda c: c.broadcast(records()), "objects"),
    "list": (lambda c: c.all_reduce([1.0, 2.0]), "x must be an array.*not list"),
    "number": (lambda c: c.all_reduce(3.0), "x must be an array.*not float"),
    "None": (lambda c: c.send(None, 1), "x must be an array.*not NoneType"),
    "strided": (
        lambda c: c.all_reduce(np.zeros((4, 8), np.float32)[:, ::2]),
        r"x must be contiguous.*axis 1 of shape \(4, 4\) has a stride of 2 .* 1 is expected",
    ),
    "columns": (
        lambda c: c.send(np.zeros((4, 6), np.float32)[:, :3], 1),
        r"axis 0 of shape \(4, 3\) has a stride of 6 elements where 3 is expected",
    ),
    "Fortran order": (
        lambda c: c.broadcast(np.zeros((3, 4), order="F")),
        "contiguous in C order",
    ),
    "reversed": (lambda c: c.all_reduce(np.zeros(4)[::-1]), "stride of -1"),
    "strided out": (
        lambda c: c.all_reduce(FLOATS, out=np.zeros(16, np.float32)[::2]),
        "out must be contiguous",
    ),
    "read-only in place": (
        lambda c: c.all_reduce(frozen(np.zeros(4))),
        "x is read-only.*writable out",
    ),
    "read-only out": (
        lambda c: c.all_gather(FLOATS, out=frozen(np.zeros(16, np.float32))),
        "out is read-only",
    ),
    "read-only recv": (lambda c: c.recv(frozen(np.zeros(4)), 1), "x is read-only"),
    "bytes in place": (lambda c: c.all_reduce(b"abcd"), "x is read-only"),
    "smaller out": (
        lambda c: c.all_reduce(FLOATS, out=np.zeros(7, np.float32)),
        "out has 7 elements, expected 8",
    ),
    "out of a gather": (
        lambda c: c.all_gather(FLOATS, out=np.zeros(8, np.float32)),
        "out has 8 elements, expected 16: 2 ranks times x's 8",
    ),
    "out of a scatter": (
        lambda c: c.reduce_scatter(FLOATS, out=np.zeros(8, np.float32)),
        "out has 8 elements, expected 4",
    ),
    "indivisible": (
        lambda c: c.reduce_scatter(np.zeros((3, 2), np.float32)),
        "x has 3 rows.*divided evenly among 2 ranks",
    ),
    "no axis": (lambda c: c.all_to_all(np.zeros(())), "no first axis"),
    "other type": (
        lambda c: c.all_reduce(FLOATS, out=np.zeros(8)),
        r"out has elements of float64 \(8 bytes\), the input has float32 \(4 bytes\)",
    ),
    "same size, other type": (
        lambda c: c.broadcast(FLOATS, out=np.zeros(8, np.int32)),
        "out has elements of int32",
    ),
    "ahead": (lambda c: c.all_reduce(*crossed("ahead")), "overlap; in place means the same"),
    "behind": (lambda c: c.all_reduce(*crossed("behind")), "overlap"),
    "gather: wrong block": (
        lambda c: c.all_gather(*crossed("wrong block")),
        "overlap; in place means that x is this rank's own block",
    ),
    "gather: half a block": (lambda c: c.all_gather(*crossed("half a block")), "overlap"),
    "all-to-all in place": (
        lambda c: c.all_to_all(FLOATS, out=FLOATS),
        "cannot run in place",
    ),
    "scatter without out": (
        lambda c: c.scatter(None, root=1),
        "out is needed on rank 0: only the root knows the shape",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_an_array_that_does_not_fit_is_refused(temper: str, name: str) -> None:
    call, message = WRONG[name]
    async with clique(2) as comms:
        issued = [comm.issued for comm in comms]
        with testing.journal() as journal, pytest.raises(InvalidBufferError, match=message):
            call(comms[0])
        assert journal.calls == []
        assert [comm.issued for comm in comms] == issued
        await all_reduced(comms)


@pytest.mark.parametrize("rank", [0, 1])
async def test_in_place_as_nccl_has_it_is_no_overlap(temper: str, rank: int) -> None:
    async with clique(2) as comms:
        whole = [np.zeros(4, np.float32) for _ in comms]
        works = []
        for comm, array in zip(comms, whole, strict=True):
            block = array[2 * comm.rank : 2 * comm.rank + 2]
            block[:] = comm.rank + 1
            works.append(comm.all_gather(block, out=array))
        results = [await work for work in works]
        assert results[rank] is whole[rank]
        assert whole[rank].tolist() == [1, 1, 2, 2]
        for comm, array in zip(comms, whole, strict=True):
            block = array[2 * comm.rank : 2 * comm.rank + 2]
            works.append(comm.reduce_scatter(array, out=block))
        await works[-2]
        await works[-1]
        assert whole[rank][2 * rank : 2 * rank + 2].tolist() == [2 * rank + 2] * 2


async def test_an_axis_of_one_may_have_any_stride(temper: str) -> None:
    """As NumPy makes it: x[::2] of one row is as contiguous as x."""
    async with clique(1) as comms:
        x = np.ones((8, 4), np.float32)[:1:5]
        assert x.strides[0] != 16
        await comms[0].all_reduce(x)
        empty = np.zeros((4, 0), np.float32)[::2]
        assert (await comms[0].all_reduce(empty)) is empty


def test_who_knows_buffers_knows_the_error() -> None:
    assert issubclass(InvalidBufferError, BufferError)
