"""``__cuda_array_interface__``: for those who have no DLPack."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cliques import all_reduced, clique
from on_gpu import Interface, Stream, gpus

from pynccl import InvalidBufferError, testing


@pytest.mark.parametrize("version", [2, 3])
async def test_it_is_taken(on_gpu: None, version: int) -> None:
    async with gpus(1) as (comm,):
        with Stream() as stream, stream.memory([1, 2, 3, 4]) as memory:
            x = Interface(memory.reshape(2, 2), version=version, strides=(8, 4))
            for name in ("stream", "strides"):  # version 2 has no stream; strides may be absent
                if version == 2:
                    del x.__cuda_array_interface__[name]
            out = Interface(memory.copy(), data=(memory.ctypes.data, False))
            assert await comm.all_reduce(x) is x
            assert await comm.all_reduce(x, out=out) is out
            empty = Interface(np.zeros((0, 3), np.float32), data=(0, False))
            await comm.all_reduce(empty)


async def test_its_stream_is_put_in_order(on_gpu: None, temper: str) -> None:
    async with gpus(1) as (comm,):
        with Stream() as stream, stream.memory([1, 2]) as memory:
            for told, sync, ordered in ((stream.handle, True, 1), (stream.handle, False, 0),
                                        (None, True, 0)):  # fmt: skip
                with testing.journal() as journal:
                    await comm.all_reduce(Interface(memory, stream=told), sync=sync)
                marks = [c for c in journal.named("cuEventRecord") if c.stream == told]
                backs = [c for c in journal.named("cuStreamWaitEvent") if c.stream == told]
                assert len(marks) == len(backs) == ordered


async def test_types_by_letter(on_gpu: None) -> None:
    async with gpus(1) as (comm,):
        with Stream() as stream, stream.memory([0.0] * 16) as memory:
            for dtype in ("f2", "f4", "f8", "i1", "u1", "i4", "u8", "bfloat16", "float8_e5m2"):
                kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
                await comm.all_reduce(Interface(memory.view(kind)))
            for dtype in ("b1", "i2", "c8", "M8[s]", "V12", "S3", "U3", ">f4"):
                x = Interface(np.empty(2, dtype), data=(memory.ctypes.data, False))
                await comm.broadcast(x)
                if dtype not in ("b1", "c8"):
                    with pytest.raises(InvalidBufferError, match="moved but not reduced"):
                        comm.all_reduce(x)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": 4}, "version 4 of the CUDA array interface, expected 0 to 3"),
    "mask": ({"mask": object()}, "x is masked"),
    "strides": ({"strides": (8,)}, r"axis 0 of shape \(2,\) has a stride of 2 elements"),
    "reversed": ({"strides": (-4,)}, "a stride of -1"),
    "stream 0": ({"stream": 0}, "stream 0 in its CUDA array interface, expected None, 1"),
    "stream": ({"stream": "legacy"}, "stream 'legacy'"),
    "read-only": ({"data": "read-only"}, "x is read-only"),
    "objects": ({"typestr": "|O8", "shape": (1,)}, "type |O8, which cannot be moved"),
    "no type": ({"typestr": 7}, "Interface has no good __cuda_array_interface__"),
    "no data": ({"data": None}, "no good __cuda_array_interface__"),
    "host memory": ({"data": "elsewhere"}, "no memory of the nccl engine's devices"),
    "another device": ({"data": "another"}, "x is on cuda:1, this communicator is on cuda:0"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_does_not_fit(on_gpu: None, name: str) -> None:
    told, message = WRONG[name]
    async with gpus(1) as (comm,):
        with (
            Stream() as stream,
            stream.memory([1, 2]) as memory,
            Stream(1) as other,
            other.memory([1, 2]) as another,
        ):
            places = {
                "read-only": (memory.ctypes.data, True),
                "elsewhere": (memory.copy().ctypes.data, False),
                "another": (another.ctypes.data, False),
            }
            if isinstance(told.get("data"), str):
                told = {"data": places[told["data"]]}
            issued = comm.issued
            with pytest.raises(InvalidBufferError, match=message.replace("|", r"\|")):
                comm.all_reduce(Interface(memory, **told))
            assert comm.issued == issued
            await comm.all_reduce(Interface(memory))


async def test_on_the_host_engine(temper: str) -> None:
    """Memory that the engine gave is its own, whatever it is called."""
    async with clique(1) as comms:
        with Stream() as stream, stream.memory([1, 2]) as memory:
            x = Interface(memory, stream=None)
            assert await comms[0].all_reduce(x) is x
        with pytest.raises(InvalidBufferError, match="no memory of the host engine's devices"):
            comms[0].all_reduce(Interface(np.ones(2, np.float32)))
        await all_reduced(comms)
