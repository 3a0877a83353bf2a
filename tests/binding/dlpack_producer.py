"""An array library by hand: host memory that shows itself by DLPack and nothing else."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

CPU, CUDA = 1, 2
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
READ_ONLY = 1

capsule_new = ctypes.pythonapi.PyCapsule_New
capsule_new.restype = ctypes.py_object
capsule_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("tensor", Tensor),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


class Producer:
    """A host array, given out in DLPack 1.x capsules."""

    versioned = True

    def __init__(
        self,
        array: NDArray[Any],
        *,
        readonly: bool = False,
        device: tuple[int, int] = (CPU, 0),
        offset: int = 0,
        major: int = 1,
    ) -> None:
        self.array = array
        self.readonly = readonly
        self.place = device
        self.offset = offset
        self.major = major
        self.asked: list[dict[str, Any]] = []
        self._exports: list[tuple[Any, ...]] = []

    @property
    def held(self) -> int:
        """How many of its capsules somebody else holds.

        They are counted by their references: a destructor in Python would run with whatever
        exception is on its way, which only C can put aside.
        """
        return sum(sys.getrefcount(export[0]) > 2 for export in self._exports)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    @property
    def device(self) -> tuple[int, int]:
        return self.place

    def __array_namespace__(self) -> Any:
        return Namespace(type(self))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versioned and "max_version" in options:
            raise TypeError("max_version is not known")
        self.asked.append(options)
        array = self.array
        dims = ctypes.c_int64 * array.ndim
        shape = dims(*array.shape)
        strides = dims(*(s // array.itemsize for s in array.strides))
        tensor = Tensor(
            data=array.ctypes.data - self.offset,
            device_type=self.place[0],
            device_id=self.place[1],
            ndim=array.ndim,
            code=CODES[array.dtype.kind],
            bits=8 * array.itemsize,
            lanes=1,
            shape=shape,
            strides=strides,
            byte_offset=self.offset,
        )
        managed: Any
        if self.versioned:
            flags = READ_ONLY if self.readonly else 0
            managed = Versioned(major=self.major, minor=1, flags=flags, tensor=tensor)
        else:
            managed = _Managed(tensor=tensor)
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        capsule = capsule_new(ctypes.addressof(managed), name, None)
        self._exports.append((capsule, name, managed, shape, strides, array))
        return capsule


class Older(Producer):
    """In capsules of before DLPack 1.0."""

    versioned = False


class Namespace:
    """The few functions of the array API that a result takes."""

    def __init__(self, kind: type[Producer]) -> None:
        self.kind = kind

    def empty(self, shape: tuple[int, ...], *, dtype: Any, device: Any) -> Producer:
        return self.kind(np.empty(shape, dtype), device=device)
