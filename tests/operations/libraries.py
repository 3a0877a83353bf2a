"""The array libraries and dtypes that the table of the README is about.

Every array is made from a NumPy array of the same bytes, and read back as one, so that what an
operation gives is compared with what NumPy and ml_dtypes say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import array_api_strict
import jax
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from pynccl._native.results import wide_types

Array = NDArray[Any]

#: By the names that the table uses.
DTYPES: dict[str, np.dtype[Any]] = {
    **{
        name: np.dtype(name)
        for name in (
            *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
            *("float16", "float32", "float64", "bool"),
            *("int16", "uint16", "complex64", "complex128"),
        )
    },
    **{
        name: np.dtype(getattr(ml_dtypes, name))
        for name in (
            *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
            *("float8_e5m2fnuz", "float8_e8m0fnu", "int4", "float4_e2m1fn"),
        )
    },
    "datetime64": np.dtype("datetime64[s]"),
    "bytes (S)": np.dtype("S5"),
    "records": np.dtype([("key", np.int16), ("value", np.float64)]),
}


@dataclass(frozen=True)
class Library:
    name: str
    make: Callable[[Array], Any]
    """The same array in this library; raises where it has no such dtype."""
    read: Callable[[Any], Array]
    kind: type


def _torch() -> Library:
    torch: Any = pytest.importorskip("torch", reason="no torch: waits for PyTorch")

    def make(x: Array) -> Any:
        dtype = getattr(torch, x.dtype.name)
        if dtype in (getattr(torch, "int4", None), getattr(torch, "uint4", None)):
            raise AttributeError("a placeholder: torch has no operations for it")
        return torch.from_numpy(x.view(np.uint8).copy()).view(dtype).reshape(x.shape)

    def read(x: Any) -> Array:
        return np.asarray(x.reshape(-1).view(torch.uint8).numpy())

    return Library("PyTorch", make, read, torch.Tensor)


def _jax_make(x: Array) -> Any:
    if x.dtype.name == "float4_e2m1fn":
        # Refused: XLA has each in a byte and exports them as packed. tests/arrays has the test.
        raise NotImplementedError(x.dtype)
    with wide_types(jax):
        made = jax.numpy.asarray(x)
    if made.dtype != x.dtype:
        raise TypeError(made.dtype)
    return made


def _strict_make(x: Array) -> Any:
    return array_api_strict.asarray(x, copy=True)


def libraries() -> list[Library]:
    """NumPy with ml_dtypes, PyTorch, JAX, and the strict array API."""
    strict = type(array_api_strict.zeros(1))
    return [
        Library("NumPy", np.copy, np.asarray, np.ndarray),
        _torch(),
        Library("JAX", _jax_make, np.asarray, jax.Array),
        Library("array-api-strict", _strict_make, np.asarray, strict),
    ]


def bytes_of(library: Library, x: Any) -> bytes:
    """The memory of an array, in C order."""
    return library.read(x).tobytes()
