"""Arrays in memory of pynccl's own."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

import pynccl._native.dlpack_table  # noqa: F401 (fills the table behind Array)
from pynccl import _engines
from pynccl._communicator import Communicator
from pynccl._native.memory import Array, empty_array, type_name
from pynccl.errors import ConfigError


def empty(
    shape: int | Iterable[int],
    dtype: Any = "float32",
    *,
    device: str | int | Communicator | None = None,
    registered: bool = True,
) -> Array:
    """Make an uninitialised array in memory that NCCL can register (``ncclMemAlloc``).

    Between processes on the host engine, operations on such arrays read the peers' memory with
    no copy in between. The first use of a device makes its context, which takes a GPU some
    hundred milliseconds: make arrays before the loop, or by ``asyncio.to_thread``.

    Args:
        shape: the length of each axis, or one length.
        dtype: a name such as ``"bfloat16"``, or a type of NumPy, ml_dtypes, JAX or torch.
        device: as in ``connect``, or a communicator: its device.
        registered: False for ordinary memory of the device (``cuMemAlloc``), which cannot be a
            window.

    Raises:
        ConfigError: a bad shape, dtype or device. NotSupportedError: NCCL is older than 2.19.
        CudaError: the device is out of memory.
    """
    name = type_name(dtype)
    try:
        lengths = tuple(map(index, shape)) if isinstance(shape, Iterable) else (index(shape),)
    except TypeError:
        raise ConfigError(f"shape must be integers, not {shape!r}") from None
    if any(length < 0 for length in lengths):
        raise ConfigError(f"shape must not be negative, but is {lengths}")
    if isinstance(device, Communicator):
        return empty_array(
            device.engine, device.device_ordinal, lengths, name, plain=not registered
        )
    engine, ordinal = _engines.resolve(device)
    return empty_array(engine, ordinal, lengths, name, plain=not registered)
