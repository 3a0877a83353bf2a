"""Fresh results: their shape, their library, and that they are written once; own blocks."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from cliques import all_reduced, arrays, clique

import pynccl
from pynccl import ConfigError, InvalidBufferError, testing


async def test_stacked(temper: str) -> None:
    async with clique(3) as comms:
        xs = [np.full((2, 5), comm.rank) for comm in comms]
        works = [comm.all_gather(x, stack=True) for comm, x in zip(comms, xs, strict=True)]
        for result in await pynccl.wait(*works):
            assert np.array_equal(result, np.stack(xs))
        works = [comm.gather(x, root=1, stack=True) for comm, x in zip(comms, xs, strict=True)]
        none, result, other = await pynccl.wait(*works)
        assert none is None
        assert other is None
        assert np.array_equal(result, np.stack(xs))
        scalars = [comm.all_gather(np.array(comm.rank), stack=True) for comm in comms]
        assert (await pynccl.wait(*scalars))[2].tolist() == [0, 1, 2]
        with pytest.raises(ConfigError, match="stack=True shapes a fresh result"):
            comms[0].all_gather(xs[0], out=np.zeros((3, 2, 5)), stack=True)
        await all_reduced(comms)


async def test_own_blocks(temper: str) -> None:
    async with clique(2) as comms:
        wholes = [np.zeros((4, 3), np.float32) for _ in comms]
        for comm, whole in zip(comms, wholes, strict=True):
            comm.slot(whole)[:] = comm.rank + 1
        works = [
            comm.all_gather(comm.slot(whole), out=whole)
            for comm, whole in zip(comms, wholes, strict=True)
        ]
        for result in await pynccl.wait(*works):
            assert result[:, 0].tolist() == [1, 1, 2, 2]
        works = [
            comm.reduce_scatter(whole, out=comm.slot(whole))
            for comm, whole in zip(comms, wholes, strict=True)
        ]
        await pynccl.wait(*works)
        assert [whole[2 * i, 0] for i, whole in enumerate(wholes)] == [2, 4]
        stacked = np.zeros((2, 3))
        assert comms[1].slot(stacked).shape == (1, 3)
        for wrong, message in (
            (np.zeros(3), "array has 3 rows, which cannot be divided"),
            (np.zeros(()), "array has no first axis"),
            (np.zeros((4, 4))[::2], "array must be contiguous"),
            (jax.numpy.zeros(4), "array is read-only"),
        ):
            with pytest.raises(InvalidBufferError, match=message):
                comms[0].slot(wrong)


@pytest.mark.parametrize(
    "dtype",
    [
        *("float32", "complex64", "int16", "bool", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e8m0fnu"),
    ],
)
async def test_jax_takes_its_results_as_they_are(temper: str, dtype: str) -> None:
    """The device writes into the very memory that the array of JAX then has."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    async with clique(1) as comms:
        x = jax.numpy.ones((3, 5), kind)
        work = comms[0].all_gather(x)
        written = work.out.ptr
        assert written % 64 == 0
        result = await work
        assert result.unsafe_buffer_pointer() == written
        assert result.dtype == kind
        assert result is work.out
        assert result is await work


async def test_without_elements(temper: str) -> None:
    async with clique(2) as comms:
        for shape in ((0,), (0, 3), (2, 0)):
            xs = [np.zeros(shape) for _ in comms]
            for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather"):
                works = [getattr(c, name)(x) for c, x in zip(comms, xs, strict=True)]
                result, _ = await pynccl.wait(*works)
                assert result.size == 0
            async with pynccl.group():
                comms[0].send(xs[0], 1)
                comms[1].recv(xs[1], 0)
        await all_reduced(comms)


async def test_messages_that_differ(temper: str) -> None:
    """Both sides are told what each has called."""
    for mine, other in ((np.zeros(4, np.int16), np.zeros(3, np.int16)), (np.zeros(2), b"ab")):
        async with clique(2) as comms:
            works = [comms[0].send(mine, 1), comms[1].recv(bytearray(bytes(other)), 0)]
            for work in works:
                with pytest.raises(pynccl.MismatchError) as caught:
                    await work
                text = str(caught.value)
                assert "message 1 from rank 0 to rank 1" in text
                assert "ncclSend" in text
                assert "ncclRecv" in text
            await pynccl._communicator.abort_together(comms)


@pytest.mark.timeout(600)
async def test_past_2_to_31(temper: str, long: bool) -> None:
    """An all-gather of 3 GiB of bytes; by default of as many as one rank's share of it."""
    share = (3 << 30) // 2 if long else 1 << 20
    if long and temper == "gpulike":
        share = 1 << 20  # once is enough: what depends on the size is the same
    async with clique(2) as comms:
        comms[0].timeout = comms[1].timeout = 500
        xs = [np.empty(share, np.uint8) for _ in comms]
        for comm, x in zip(comms, xs, strict=True):
            x[:] = comm.rank + 1
            x[-1] = 100 + comm.rank
        out = np.zeros(2 * share, np.uint8)
        works = [comm.all_gather(x, out=out) for comm, x in zip(comms[:1], xs[:1], strict=True)]
        other = np.zeros(2 * share, np.uint8)
        works.append(comms[1].all_gather(xs[1], out=other))
        await pynccl.wait(*works)
        for result in (out, other):
            assert result.size == 2 * share
            for rank in range(2):
                part = result[rank * share : (rank + 1) * share]
                assert part[-1] == 100 + rank
                assert (part[:-1] == rank + 1).all()
        assert works[0].nbytes == share


async def test_nothing_is_issued_by_what_is_refused(temper: str) -> None:
    async with clique(2) as comms:
        xs = arrays(comms)
        with testing.journal() as journal:
            for x in (np.zeros(4, np.int16), np.zeros(4, "S3"), np.zeros(4, np.complex64)):
                with pytest.raises(InvalidBufferError):
                    comms[0].all_reduce(x, op="max")
        assert journal.calls == []
        await pynccl.wait(*(comm.all_reduce(x) for comm, x in zip(comms, xs, strict=True)))
