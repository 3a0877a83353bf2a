"""Communicators, streams and memory of "GPUs": the host engine where the binding sees CUDA."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
from cliques import abort
from foreign_stream import ForeignStream
from numpy.typing import NDArray
from tensors import CUDA, Tensor, Versioned

import pynccl


@contextlib.asynccontextmanager
async def gpus(size: int, *, warm: bool = True) -> AsyncIterator[list[Any]]:
    """All ranks of a communicator on cuda:0 to cuda:size-1.

    One rank that is warm issues inline, several go through their lanes.
    """
    comms = await pynccl.create_all([f"cuda:{i}" for i in range(size)])
    try:
        if warm:
            xs = [on(comm.rank, np.ones(4, np.float32)) for comm in comms]
            await pynccl.wait(*(c.all_reduce(x) for c, x in zip(comms, xs, strict=True)))
        yield comms
    except BaseException:
        await abort(comms)
        raise
    await asyncio.gather(*(comm.close() for comm in comms))


def on(device: int, array: NDArray[Any], kind: type[Tensor] = Versioned) -> Any:
    """A tensor on a GPU, by name: the engine reads any memory."""
    return kind(array, device_type=CUDA, device_id=device)


class Stream(ForeignStream):
    """The stream of an array library, with memory of its device."""

    def go_before(self, other: int) -> None:
        """Have another stream wait for what is on this one: what __dlpack__ does."""
        event = ctypes.c_void_p()
        with self.current():
            self.must("cuEventCreate", ctypes.byref(event), 2)
            self.must("cuEventRecord", event, ctypes.c_void_p(self.handle))
            self.must("cuStreamWaitEvent", ctypes.c_void_p(other), event, 0)
            self.must("cuEventDestroy_v2", event)

    @contextlib.contextmanager
    def memory(self, values: list[float]) -> Iterator[NDArray[np.float32]]:
        """A float32 array in memory of the device."""
        pointer = ctypes.c_uint64()
        with self.current():
            size = ctypes.c_size_t(4 * len(values))
            self.must("cuMemAlloc_v2", ctypes.byref(pointer), size)
        made = (ctypes.c_float * len(values)).from_address(pointer.value)
        array = np.frombuffer(made, np.float32)
        array[:] = values
        try:
            yield array
        finally:
            with self.current():
                self.must("cuMemFree_v2", pointer)


class Orderly(Versioned):
    """As a library on a GPU: gives an array out in order with its current stream."""

    stream: Stream

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if stream not in (None, -1):
            self.stream.go_before(stream)
        return super().__dlpack__(stream=stream, **options)


class Interface:
    """Shows itself by ``__cuda_array_interface__`` alone."""

    def __init__(self, array: NDArray[Any], **told: Any) -> None:
        self.array = array
        self.dtype = array.dtype
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "strides": None,
            "stream": None,
            **told,
        }
