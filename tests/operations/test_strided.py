"""Strided arrays with pack=True: there and back, in order, and refused where they cannot be."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from cliques import all_reduced, clique

import pynccl
from pynccl import InvalidBufferError, UsageError, testing


def torch() -> Any:
    return pytest.importorskip("torch", reason="no torch: waits for PyTorch")


def strided(library: str, value: float, rows: int = 4) -> Any:
    """A view of every other column of something larger."""
    if library == "torch":
        return torch().full((rows, 6), value, dtype=torch().float32)[:, ::2]
    return np.full((rows, 6), value, np.float32)[:, ::2]


def base(x: Any) -> Any:
    """The untouched columns between those of the view."""
    return x.base[:, 1::2] if isinstance(x, np.ndarray) else x._base[:, 1::2]


@pytest.mark.parametrize("library", ["numpy", "torch"])
async def test_every_operation_there_and_back(temper: str, library: str) -> None:
    async with clique(2) as comms:
        for name, given, out_rows, wanted in (
            ("all_reduce", 4, 0, [[3.0] * 4] * 2),
            ("all_reduce", 4, 4, [[3.0] * 4] * 2),
            ("broadcast", 4, 0, [[1.0] * 4] * 2),
            ("all_gather", 2, 4, [[1.0, 1.0, 2.0, 2.0]] * 2),
            ("reduce_scatter", 4, 2, [[3.0] * 2] * 2),
            ("all_to_all", 4, 4, [[1.0, 1.0, 2.0, 2.0]] * 2),
            ("gather", 2, 4, [[1.0, 1.0, 2.0, 2.0], None]),
            ("scatter", 4, 2, [[1.0] * 2] * 2),
            ("all_gather_v", 2, 4, [[1.0, 1.0, 2.0, 2.0]] * 2),
        ):
            xs = [strided(library, comm.rank + 1.0, given) for comm in comms]
            outs = [strided(library, 9.0, out_rows) if out_rows else None for _ in comms]
            works = [
                getattr(comm, name)(x, out=out, pack=True)
                for comm, x, out in zip(comms, xs, outs, strict=True)
            ]
            results = await pynccl.wait(*works)
            for x, out, result, right in zip(xs, outs, results, wanted, strict=True):
                if right is None:
                    continue
                assert result is (x if out is None else out)
                assert result[:, 0].tolist() == result[:, 2].tolist() == right, name
                assert set(base(result).reshape(-1).tolist()) <= {1.0, 2.0, 9.0}, name
        inbox = strided(library, 0.0)
        sent = comms[0].send(strided(library, 7.0), 1, pack=True)
        assert (await comms[1].recv(inbox, 0, pack=True)) is inbox
        await sent
        assert inbox[:, 1].tolist() == [7.0] * 4


async def test_a_contiguous_array_is_not_copied(temper: str) -> None:
    async with clique(1) as comms:
        x = np.ones(4)
        work = comms[0].all_reduce(x, pack=True)
        assert work.out is x
        work.order(0)  # no copy at the end, so its order is that of the stream
        await work


async def test_nobody_awaits(temper: str) -> None:
    """The copy back is made when the operation is let go of."""
    async with clique(1, warm=True) as comms:
        x = strided("numpy", 2.0)
        out = strided("numpy", 0.0)
        comms[0].all_reduce(x, out=out, pack=True)
        for _ in range(200):
            await asyncio.sleep(0.005)
            if out[3, 2] == 2.0:
                break
        assert out.tolist() == [[2.0] * 3] * 4


async def test_the_scratch_array_goes_with_the_operation(temper: str) -> None:
    class Watched(np.ndarray):
        pass

    async with clique(1) as comms:
        x = np.ones((4, 6)).view(Watched)[:, ::2]
        work = comms[0].all_reduce(x, pack=True)
        gone = weakref.ref(x)
        assert (await work) is x
        del work, x
        await asyncio.sleep(0.02)
        gc.collect()
        assert gone() is None


async def test_a_failed_operation_writes_nothing(temper: str) -> None:
    async with clique(2) as comms:
        out = strided("numpy", 5.0)
        work = comms[0].all_reduce(strided("numpy", 1.0), out=out, pack=True, timeout=0.05)
        with pytest.raises(pynccl.DeadlineError):
            await work
        await asyncio.gather(*(comm.abort() for comm in comms))
        assert out.tolist() == [[5.0] * 3] * 4


async def test_the_order_of_streams_is_not_enough(temper: str) -> None:
    async with clique(1) as comms:
        work = comms[0].all_reduce(strided("numpy", 1.0), pack=True)
        with pytest.raises(UsageError, match="strided result.*await it"):
            work.order(0)
        await work


REFUSED: dict[str, tuple[Any, str]] = {
    "without pack": (
        lambda c: c.all_reduce(strided("numpy", 1.0)),
        "axis 1 of shape .4, 3. has a stride of 2 .*pack=True",
    ),
    "all rows in one place": (
        lambda c: c.all_reduce(torch().zeros(1, 3).expand(4, 3), pack=True),
        "x cannot be written: all 4 rows of its axis 0 are at the same place",
    ),
    "read-only": (
        lambda c: c.all_reduce(np.ones(4), out=np.broadcast_to(np.ones(()), 4), pack=True),
        "out cannot be written: all 4 rows",
    ),
    "read-only and strided": (
        lambda c: c.all_reduce(frozen(np.ones(8)[::2]), pack=True),
        "x cannot be written: .*read-only",
    ),
    "no array": (lambda c: c.all_reduce([1.0], pack=True), "x must be an array.*not list"),
    "objects": (
        lambda c: c.broadcast(np.array([1, "a"], object)[::-1], pack=True),
        "Python objects|contiguous",
    ),
    "another size": (
        lambda c: c.all_reduce(np.ones(4), out=np.ones(6)[::2], pack=True),
        "out has 3 elements, expected 4",
    ),
}


def frozen(x: Any) -> Any:
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("name", REFUSED)
async def test_it_is_refused_before_anything_is_issued(temper: str, name: str) -> None:
    called, message = REFUSED[name]
    async with clique(2) as comms:
        with testing.journal() as journal, pytest.raises(InvalidBufferError, match=message):
            called(comms[0])
        assert journal.calls == []
        await all_reduced(comms)


async def test_a_strided_input_may_be_read_only(temper: str) -> None:
    async with clique(1) as comms:
        x = frozen(np.arange(8.0)[::2])
        out = np.zeros(4)
        assert (await comms[0].all_reduce(x, out=out, pack=True)) is out
        assert out.tolist() == [0, 2, 4, 6]
        assert (await comms[0].broadcast(x, pack=True)) is x


async def test_what_the_copy_back_raises_is_the_outcome(temper: str) -> None:
    class Moody(np.ndarray):
        def __setitem__(self, key: Any, value: Any) -> None:
            if np.size(value):
                raise RuntimeError("not today")
            super().__setitem__(key, value)

    async with clique(1) as comms:
        x = np.ones(8).view(Moody)[::2]
        work = comms[0].all_reduce(np.ones(4), out=x, pack=True)
        with pytest.raises(RuntimeError, match="not today"):
            await work
        await all_reduced(comms)
