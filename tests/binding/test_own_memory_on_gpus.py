"""Arrays on GPUs: the host engine poses as an engine whose memory is there."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl import Communicator, InvalidBufferError, Stream, _engines, testing
from pynccl._native.engine import Engine
from pynccl._native.memory import Array, empty_array

CUDA = 2


@pytest.fixture(scope="module")
def posed() -> Engine:
    path = _engines.engine("host").path("ncclGetVersion")
    assert path is not None
    return Engine("posed", path, path, is_cuda=True)


async def alone(engine: Engine) -> Communicator:
    """A communicator of one rank on device 1."""
    return await Communicator._bring_up(engine, 1, 1, 0, engine.unique_id(), None, 10.0)


def on_gpu(engine: Engine, dtype: str = "float32", device: int = 1) -> Array:
    return empty_array(engine, device, (3, 2), dtype, plain=False)


def test_what_it_says_of_itself(posed: Engine) -> None:
    x = on_gpu(posed)
    assert x.device == "cuda:1"
    assert x.__dlpack_device__() == (CUDA, 1)
    interface = x.__cuda_array_interface__
    assert interface == {
        "version": 3,
        "shape": (3, 2),
        "typestr": "<f4",
        "data": (x.ptr, False),
        "strides": None,
        "stream": None,
    }
    assert x[1:].__cuda_array_interface__["data"] == (x.ptr + 8, False)
    with pytest.raises(BufferError, match="this array is on a GPU"):
        memoryview(x)
    assert not hasattr(on_gpu(posed, "bfloat16"), "__cuda_array_interface__")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": 0}, "stream 0 is ambiguous"),
        ({"stream": -2}, "a consumer's stream is -1, 1, 2 or a handle, not -2"),
        ({"stream": "x"}, "a consumer's stream is -1, 1, 2 or a handle, not 'x'"),
        ({"copy": True}, "copy=True is for host memory"),
        ({"dl_device": (1, 0)}, "not on"),
        ({"dl_device": (CUDA, 0)}, "not on"),
    ],
)
def test_what_it_does_not_export(posed: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BufferError, match=message):
        on_gpu(posed).__dlpack__(**options)


async def test_a_consumers_stream_waits_for_what_has_not_ended(
    temper: str, posed: Engine
) -> None:
    comm = await alone(posed)
    stream = Stream("cpu:1")
    x, y = on_gpu(posed), on_gpu(posed)
    await comm.all_reduce(x)
    with testing.faults("op:delay=200ms"), testing.journal() as journal:
        work = comm.all_reduce(x)
        y.__dlpack__(stream=stream.handle, max_version=(1, 0))
        x.__dlpack__(stream=-1, max_version=(1, 0))
        assert stream.query()
        x[1:].__dlpack__(stream=stream.handle, max_version=(1, 0))

        def waits() -> int:
            calls = journal.named("cuStreamWaitEvent")
            return sum(call.stream == stream.handle for call in calls)

        assert waits() == 1
        assert not stream.query()
        assert not work.done()
        await stream
        assert work.done()
        x.__dlpack__(stream=stream.handle)
        assert waits() == 1
    await work
    await comm.close()


async def test_it_must_be_on_the_communicators_device(temper: str, posed: Engine) -> None:
    comm = await alone(posed)
    for x in (on_gpu(posed, device=2), pynccl.empty((3, 2), device="cpu:1")):
        with pytest.raises(
            InvalidBufferError, match=r"x is .*, (but )?this communicator is on"
        ):
            comm.all_reduce(x)
    x = on_gpu(posed)
    assert await comm.all_reduce(x) is x
    fresh = await comm.all_gather(x)
    assert (type(fresh), fresh.device, fresh.shape) == (Array, "cuda:1", (3, 2))
    await comm.close()


async def test_a_scalar_on_the_device(temper: str, posed: Engine) -> None:
    comm = await alone(posed)
    scalar = empty_array(posed, 1, (), "float32", plain=False)
    host = np.array([2], np.float32)
    with pynccl.pre_mul_sum(comm, scalar, "float32"), pynccl.pre_mul_sum(comm, host, "float32"):
        pass
    elsewhere = empty_array(posed, 2, (), "float32", plain=False)
    for wrong, message in (
        (elsewhere, "scalar is on cuda:2, this communicator is on posed device 1"),
        (memoryview(b"1234"), "scalar is in host memory"),
    ):
        with pytest.raises(InvalidBufferError, match=message):
            pynccl.pre_mul_sum(comm, wrong, "float32")
    await asyncio.sleep(0)
    await comm.close()
