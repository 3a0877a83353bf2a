"""NumPy, PyTorch, JAX and array-api-strict as they come from PyPI: what only each does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cliques import all_reduced, clique

import pynccl
from pynccl import InvalidBufferError, testing

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


class Mine(np.ndarray):
    pass


async def test_subclasses_of_ndarray(temper: str, tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(4,))
    mapped[:] = 2
    records = np.ones(3, np.dtype([("a", "f4"), ("b", "i2")])).view(np.recarray)
    async with clique(1) as comms:
        for x in (mapped, np.ones(2).view(Mine), np.ma.array([1.0, 2.0])):
            assert await comms[0].all_reduce(x) is x
        assert await comms[0].broadcast(records) is records
        masked = np.ma.array([1.0, 2.0], mask=[0, 1])
        with pytest.raises(InvalidBufferError, match=r"x is masked; pass x.filled\(\)"):
            comms[0].all_reduce(masked)
        await all_reduced(comms)


async def test_numpys_read_only_arrays_are_inputs(temper: str) -> None:
    async with clique(1) as comms:
        for x in (np.ones(4), np.ones(4).view(Mine)):
            x.flags.writeable = False
            out = np.zeros(x.shape)
            await comms[0].all_reduce(x, out=out)
            assert (out == 1).all()
            with pytest.raises(InvalidBufferError, match="x is read-only"):
                comms[0].all_reduce(x)


async def test_jax_takes_results_without_a_copy(temper: str) -> None:
    async with clique(2, warm=True) as comms:
        xs = [jnp.arange(6, dtype=jnp.float32).reshape(3, 2) + comm.rank for comm in comms]
        works = [comm.all_gather(x) for comm, x in zip(comms, xs, strict=True)]
        places = [work.out.ptr for work in works]
        results = await pynccl.wait(*works)
        for result, place in zip(results, places, strict=True):
            assert isinstance(result, jax.Array)
            assert place % 64 == 0
            assert result.unsafe_buffer_pointer() == place
            assert (np.asarray(result) == np.concatenate([np.asarray(x) for x in xs])).all()


async def test_jax_arrays_that_are_dropped_or_deleted(temper: str) -> None:
    async with clique(1, warm=True) as comms:
        out = np.zeros(1000, np.float32)
        with testing.faults("op:delay=20ms"):
            x = jnp.full(1000, 3, jnp.float32)
            work = comms[0].all_reduce(x, out=out)
            del x
            others = [
                jnp.full(1000, i, jnp.float32) for i in range(20)
            ]  # its memory is not free
            await work
        assert (out == 3).all()
        assert len(others) == 20
        gone = jnp.ones(4)
        gone.delete()
        with pytest.raises(InvalidBufferError, match="x cannot be taken by DLPack.*deleted"):
            comms[0].all_reduce(gone)
        with pytest.raises(InvalidBufferError, match="out is read-only"):
            comms[0].all_reduce(np.ones(4, np.float32), out=jnp.zeros(4))
        await all_reduced(comms)


async def test_jaxs_elements_of_less_than_a_byte_are_refused(temper: str) -> None:
    """XLA has a byte for each of them, and its capsule says that two share one."""
    async with clique(1) as comms:
        x = jnp.ones(8, jnp.float4_e2m1fn)
        assert x.on_device_size_in_bytes() == 8
        for call in (comms[0].all_gather, lambda x: comms[0].send(x, 0)):
            with pytest.raises(InvalidBufferError, match="x has elements of 4 bits.* uint8"):
                call(x)
        assert (await comms[0].all_gather(x.astype(jnp.uint8))).shape == (8,)
        await all_reduced(comms)


async def test_array_api_strict(temper: str) -> None:
    async with clique(2) as comms:
        xs = [array_api_strict.asarray([1.0, 2.0]) for _ in comms]
        works = [comm.all_reduce(x) for comm, x in zip(comms, xs, strict=True)]
        assert await works[0] is xs[0]
        await works[1]
        assert [float(v) for v in xs[1]] == [2.0, 4.0]
        gathered = await pynccl.wait(*(c.all_gather(x) for c, x in zip(comms, xs, strict=True)))
        assert type(gathered[0]) is type(xs[0])
        assert gathered[0].shape == (4,)


@pytest.mark.skipif(torch is None, reason="no torch: waits for PyTorch")
async def test_torchs_own_kinds(temper: str) -> None:
    async with clique(1) as comms:
        parameter: Any = torch.nn.Parameter(torch.ones(4))
        assert await comms[0].all_reduce(parameter) is parameter  # as with the .data of it
        with pytest.raises(InvalidBufferError, match="axis 1 .* stride of 3"):
            comms[0].all_reduce(torch.ones(2, 3).t())
        await all_reduced(comms)
