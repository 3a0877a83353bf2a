"""Blocks of different sizes: counts that are given, or asked for, and the order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cliques import abort, all_reduced, clique

import pynccl
from pynccl import ConfigError, InvalidBufferError, UsageError, testing

RANKS = 3
COUNTS = [2, 0, 5]
MATRIX = [[1, 0, 2], [3, 1, 0], [0, 0, 4]]
"""Rows from each rank to each."""


def rows(rank: int, count: int, dtype: Any = np.int16) -> Any:
    return (np.arange(count * 2).reshape(count, 2) + 100 * rank).astype(dtype)


def split(x: Any, counts: list[int]) -> list[Any]:
    return np.split(x, np.cumsum(counts)[:-1])


def columns(matrix: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*matrix, strict=True)]


async def every(comms: list[Any], called: Callable[[Any], Any]) -> list[Any]:
    return await pynccl.wait(*(called(comm) for comm in comms))


@pytest.mark.parametrize("known", [True, False])
async def test_gathers(temper: str, known: bool) -> None:
    counts = COUNTS if known else None
    async with clique(RANKS) as comms:
        xs = [rows(rank, count) for rank, count in enumerate(COUNTS)]
        whole = np.concatenate(xs)
        for _ in range(2):
            for result in await every(comms, lambda c: c.all_gather_v(xs[c.rank], counts)):
                assert result.dtype == np.int16
                assert np.array_equal(result, whole)
            results = await every(comms, lambda c: c.gather_v(xs[c.rank], counts, root=2))
            assert results[:2] == [None, None]
            assert np.array_equal(results[2], whole)
        outs = [np.zeros_like(whole) for _ in comms]
        results = await every(comms, lambda c: c.all_gather_v(xs[c.rank], counts, outs[c.rank]))
        for result, out in zip(results, outs, strict=True):
            assert result is out
            assert np.array_equal(out, whole)


@pytest.mark.parametrize("known", [True, False])
async def test_all_to_all(temper: str, known: bool) -> None:
    takes = columns(MATRIX)
    async with clique(RANKS) as comms:
        xs = [rows(rank, sum(counts)) for rank, counts in enumerate(MATRIX)]
        for _ in range(2):
            results = await every(
                comms,
                lambda c: c.all_to_all_v(
                    xs[c.rank], MATRIX[c.rank], takes[c.rank] if known else None
                ),
            )
            for rank, result in enumerate(results):
                blocks = [split(x, MATRIX[i])[rank] for i, x in enumerate(xs)]
                assert np.array_equal(result, np.concatenate(blocks))


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.int64])
async def test_reduce_scatter(temper: str, dtype: Any) -> None:
    async with clique(RANKS) as comms:
        xs = [rows(rank, sum(COUNTS), dtype) for rank in range(RANKS)]
        wanted = split(sum(xs[1:], xs[0]), COUNTS)
        results = await every(comms, lambda c: c.reduce_scatter_v(xs[c.rank], COUNTS))
        for result, right in zip(results, wanted, strict=True):
            assert np.array_equal(result, right)
        mine = [split(x, COUNTS)[rank] for rank, x in enumerate(xs)]
        results = await every(
            comms, lambda c: c.reduce_scatter_v(xs[c.rank], COUNTS, out=mine[c.rank])
        )
        assert np.array_equal(mine[2], wanted[2])  # in place


async def test_bool_has_its_operators(temper: str) -> None:
    async with clique(RANKS) as comms:
        xs = [np.arange(7) % 3 == comm.rank for comm in comms]
        results = await every(comms, lambda c: c.reduce_scatter_v(xs[c.rank], COUNTS, op="any"))
        assert all(result.all() for result in results)


async def test_scatter(temper: str) -> None:
    async with clique(RANKS) as comms:
        x = rows(0, sum(COUNTS))
        outs = [np.zeros((count, 2), np.int16) for count in COUNTS]

        def scatter(comm: Any) -> Any:
            if comm.rank == 1:
                return comm.scatter_v(x, COUNTS, root=1)
            return comm.scatter_v(None, out=outs[comm.rank], root=1)

        for result, right in zip(await every(comms, scatter), split(x, COUNTS), strict=True):
            assert np.array_equal(result, right)


async def test_own_block_in_place(temper: str) -> None:
    async with clique(RANKS) as comms:
        wholes = [np.zeros((7, 2), np.int16) for _ in comms]
        blocks = [split(whole, COUNTS)[rank] for rank, whole in enumerate(wholes)]
        for rank, block in enumerate(blocks):
            block[:] = rows(rank, COUNTS[rank])
        await every(comms, lambda c: c.all_gather_v(blocks[c.rank], COUNTS, out=wholes[c.rank]))
        for whole in wholes:
            assert np.array_equal(whole, wholes[0])
        assert np.array_equal(wholes[1][2:], rows(2, 5))


async def test_its_place_in_the_order_is_that_of_the_call(temper: str) -> None:
    """What is called behind an operation that asks runs behind it, on every rank."""
    async with clique(RANKS) as comms:
        works: list[list[Any]] = [[] for _ in comms]
        for comm, mine in zip(comms, works, strict=True):
            x = rows(comm.rank, COUNTS[comm.rank])
            mine.append(comm.all_gather_v(x))
            mine.append(comm.all_reduce(np.ones(3, np.float32)))
            mine.append(comm.gather_v(x))
            mine.append(comm.all_to_all_v(rows(0, 4), [1, 1, 2]))
            mine.append(comm.broadcast(np.full(2, comm.rank), root=1))
        for mine in works:
            assert [work.seq for work in mine] == [1, 2, 3, 4, 5]
            results = [await work for work in reversed(mine)]
            assert results[0].tolist() == [1, 1]
            assert results[3].tolist() == [3, 3, 3]
            assert len(results[4]) == 7


async def test_the_order_across_communicators(temper: str) -> None:
    """Two communicators of the same devices: the second waits for the first's counts."""
    async with clique(2) as first, clique(2) as second:
        works = []
        for comm in (*first, *second):
            comm.ordered = True  # a device may have no room for both of them at once
        for one, two in zip(first, second, strict=True):
            works.append(one.all_gather_v(rows(one.rank, one.rank + 1)))
            works.append(two.all_reduce(np.ones(4)))
        results = await pynccl.wait(*works)
        assert results[1].tolist() == [2, 2, 2, 2]
        assert len(results[2]) == 3


async def test_the_loop_goes_on_while_others_are_late(temper: str) -> None:
    async with clique(2) as comms:
        early = comms[0].all_gather_v(rows(0, 1))
        assert early.out is None
        turns = 0
        for _ in range(20):
            await asyncio.sleep(0.001)
            turns += 1
        assert not early.done()
        late = comms[1].all_gather_v(rows(1, 2))
        assert len(await early) == len(await late) == 3
        assert early.out is await early
        assert turns == 20


async def test_cancelled_and_dropped(temper: str) -> None:
    """The operation goes on without its waiters, and without anybody who keeps it."""
    async with clique(2) as comms:
        work = comms[0].all_gather_v(rows(0, 1))
        waiting = asyncio.ensure_future(work.future())
        await asyncio.sleep(0)
        waiting.cancel()
        del work, waiting
        assert len(await comms[1].all_gather_v(rows(1, 2))) == 3
        await all_reduced(comms)


async def test_the_deadline_counts_from_the_call(temper: str) -> None:
    async with clique(2) as comms:
        work = comms[0].all_gather_v(rows(0, 1), timeout=0.1)
        with pytest.raises(pynccl.DeadlineError, match="all_gather_v .*did not end within 0.1"):
            await work
        await abort(comms)


async def test_an_abort_while_it_asks(temper: str) -> None:
    async with clique(2) as comms:
        work = comms[0].all_to_all_v(rows(0, 2), [1, 1])
        await asyncio.sleep(0.02)
        await abort(comms)
        with pytest.raises(pynccl.AbortedError):
            await work


async def test_an_output_that_does_not_fit_what_comes(temper: str) -> None:
    """Known only when the others have told: it ends the communicator, and says why."""
    async with clique(2) as comms:
        works = [
            comms[0].all_gather_v(rows(0, 1), out=np.zeros((2, 2), np.int16)),
            comms[1].all_gather_v(rows(1, 2), timeout=1.0),
        ]
        with pytest.raises(
            UsageError, match=r"out has 4 elements, but 3 rows of 2 are coming: .*\[1, 2\]"
        ):
            await works[0]
        with pytest.raises(pynccl.NcclError):
            await works[1]
        await abort(comms)


async def test_in_groups(temper: str) -> None:
    async with clique(RANKS) as comms:
        xs = [rows(rank, count) for rank, count in enumerate(COUNTS)]
        async with pynccl.group() as group:
            for comm in comms:
                comm.all_gather_v(xs[comm.rank], COUNTS)
                comm.all_reduce(np.ones(2))
        results = await group
        assert np.array_equal(results[0], np.concatenate(xs))
        assert results[5].tolist() == [3, 3]
        with pytest.raises(UsageError, match="inside a group the counts must be given"):
            async with pynccl.group():
                comms[0].all_gather_v(xs[0])
        await all_reduced(comms)


async def test_on_streams_and_timed(temper: str) -> None:
    async with clique(2) as comms:
        for counts in ([1, 2], None):
            works = []
            for comm in comms:
                stream = pynccl.Stream(f"cpu:{comm.rank}")
                x = rows(comm.rank, comm.rank + 1)
                works.append(comm.all_gather_v(x, counts, stream=stream, timed=True))
            for work in works:
                assert len(await work) == 3
                assert 0 < work.duration < 5


async def test_strided(temper: str) -> None:
    async with clique(2) as comms:
        for counts in ([1, 2], None):
            outs = [np.zeros((3, 4), np.int16)[:, ::2] for _ in comms]
            works = [
                comm.all_gather_v(
                    np.full((comm.rank + 1, 4), comm.rank + 1, np.int16)[:, ::2],
                    counts,
                    out=out,
                    pack=True,
                )
                for comm, out in zip(comms, outs, strict=True)
            ]
            for result, out in zip(await pynccl.wait(*works), outs, strict=True):
                assert result is out
                assert out[:, 0].tolist() == out[:, 1].tolist() == [1, 2, 2]


X = rows(0, 3)
WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "too few counts": (
        lambda c: c.all_gather_v(X, [3]),
        ConfigError,
        r"counts must be 2 numbers of rows, one a rank, not \[3\]",
    ),
    "no counts": (lambda c: c.reduce_scatter_v(X, None), ConfigError, "not None"),
    "no counts on the root": (lambda c: c.scatter_v(X), ConfigError, "not None"),
    "negative": (lambda c: c.all_gather_v(X, [4, -1]), ConfigError, "numbers of rows"),
    "broken numbers": (lambda c: c.gather_v(X, [3, 1.5]), ConfigError, "numbers of rows"),
    "own count": (
        lambda c: c.all_gather_v(X, [2, 2]),
        InvalidBufferError,
        r"x has 3 rows, expected 2: counts is \[2, 2\]",
    ),
    "sum of counts": (
        lambda c: c.all_to_all_v(X, [1, 1], [1, 1]),
        InvalidBufferError,
        r"x has 3 rows, expected 2: send_counts is \[1, 1\]",
    ),
    "to itself": (
        lambda c: c.all_to_all_v(X, [2, 1], [1, 1]),
        ConfigError,
        "sends itself 2 rows, and would receive 1",
    ),
    "no axis": (
        lambda c: c.all_gather_v(np.array(3.0), [1, 1]),
        InvalidBufferError,
        "no first axis",
    ),
    "out": (
        lambda c: c.all_gather_v(X, [3, 1], out=np.zeros((3, 2), np.int16)),
        InvalidBufferError,
        "out has 6 elements, expected 4 rows of 2",
    ),
    "out of another type": (
        lambda c: c.all_gather_v(X, out=np.zeros((3, 2), np.int32)),
        InvalidBufferError,
        "out has elements of int32",
    ),
    "reduced": (
        lambda c: c.reduce_scatter_v(X, [2, 1]),
        InvalidBufferError,
        "int16 can be moved but not reduced",
    ),
    "overlap": (
        lambda c: c.all_to_all_v(X, [2, 1], [2, 1], out=X),
        InvalidBufferError,
        "an all-to-all cannot run in place",
    ),
    "in place, with nobody knowing where": (
        lambda c: c.all_gather_v(X, out=X),
        InvalidBufferError,
        "overlap",
    ),
    "elsewhere": (
        lambda c: c.scatter_v(None, root=1),
        InvalidBufferError,
        "out is needed on rank 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_it_is_refused_before_anything_is_issued(temper: str, name: str) -> None:
    called, kind, message = WRONG[name]
    async with clique(2) as comms:
        with testing.journal() as journal, pytest.raises(kind, match=message):
            called(comms[0])
        assert journal.calls == []
        await all_reduced(comms)
