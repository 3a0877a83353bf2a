"""An array library by hand, written in C as real ones are: `tensors.c` behind Python classes.

The memory is a NumPy array; everything that is told of it can be bent by a test.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "src"
CPU, CUDA, CUDA_HOST, ROCM, MANAGED = 1, 2, 3, 10, 13
READ_ONLY, COPIED, PADDED = 1, 2, 4
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


class Wish(ctypes.Structure):
    """wish_t of tensors.c."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8),
        ("has_shape", ctypes.c_int32),
        ("has_strides", ctypes.c_int32),
        ("byte_offset", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("fault", ctypes.c_int32),
    )


@functools.cache
def library() -> ctypes.PyDLL:
    """tensors.c, compiled for this interpreter; its calls keep the GIL."""
    made = Path(tempfile.mkdtemp(prefix="pynccl-tensors-")) / "tensors.so"
    command = [
        *shlex.split(os.environ.get("CC", "cc")),
        *("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"),
        *("-isystem", sysconfig.get_path("include"), "-I", os.fspath(SOURCES)),
        *(os.fspath(HERE / "tensors.c"), "-o", os.fspath(made)),
    ]
    subprocess.run(command, check=True, timeout=60)
    loaded = ctypes.PyDLL(os.fspath(made))
    made.unlink()
    made.parent.rmdir()
    loaded.tensors_capsule.restype = ctypes.py_object
    loaded.tensors_capsule.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    loaded.tensors_table_capsule.restype = ctypes.py_object
    loaded.tensors_table_capsule.argtypes = (ctypes.c_void_p,)
    return loaded


def number(name: str) -> int:
    """A counter of tensors.c: given, deleted, deleted_badly, thread, stream_asked."""
    kind = ctypes.c_ulong if name == "thread" else ctypes.c_long
    return int(kind.in_dll(library(), f"tensors_{name}").value)


def held() -> int:
    """How many tensors have been given out and not come back."""
    return number("given") - number("deleted")


def none_held() -> bool:
    """Whether all have come back, at the latest soon: another thread may be letting go."""
    end = time.perf_counter() + 0.5
    while held() and time.perf_counter() < end:
        time.sleep(0.001)
    return held() == 0


class Tensor:
    """What all of them share: the memory, and what is told of it.

    Args:
        array: the memory.
        told: fields of `Wish` that are to be told otherwise.
    """

    def __init__(self, array: NDArray[Any], **told: Any) -> None:
        self.array = array
        self.told = Wish(
            data=array.ctypes.data,
            device_type=CPU,
            ndim=array.ndim,
            code=CODES.get(array.dtype.kind, 3),
            bits=8 * array.itemsize,
            lanes=1,
            has_shape=1,
            has_strides=1,
            major=1,
            minor=1,
        )
        self.told.shape[: array.ndim] = array.shape
        self.told.strides[: array.ndim] = [s // array.itemsize for s in array.strides]
        for name, value in told.items():
            if isinstance(value, tuple):
                getattr(self.told, name)[: len(value)] = value
            else:
                setattr(self.told, name, value)
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> Any:
        return self.told.device_type, self.told.device_id

    def capsule(self, name: str) -> Any:
        return library().tensors_capsule(ctypes.addressof(self.told), self, name.encode())


class Versioned(Tensor):
    """Gives DLPack 1.x capsules."""

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Any = None,
        dl_device: Any = None,
        copy: Any = None,
    ) -> Any:
        asked = {"stream": stream, "max_version": max_version, "copy": copy}
        self.asked.append(asked)
        return self.capsule("dltensor_versioned")


class Uncopied(Tensor):
    """Knows max_version, but neither dl_device nor copy."""

    def __dlpack__(self, stream: Any = None, max_version: Any = None) -> Any:
        self.asked.append({"stream": stream, "max_version": max_version})
        return self.capsule("dltensor_versioned")


class Old(Tensor):
    """Of before DLPack 1.0: knows a stream and nothing else."""

    def __dlpack__(self, stream: Any = None) -> Any:
        self.asked.append({"stream": stream})
        return self.capsule("dltensor")


class Oldest(Tensor):
    """Knows nothing at all."""

    def __dlpack__(self) -> Any:
        self.asked.append({})
        return self.capsule("dltensor")


def tabled(table: str, base: type[Tensor] = Tensor) -> type[Any]:
    """A type with one of the tables of tensors.c, beside what `base` offers."""
    address = ctypes.addressof(ctypes.c_char.in_dll(library(), f"tensors_{table}"))
    return type(
        "Tabled",
        (base,),
        {
            "__dlpack_c_exchange_api__": library().tensors_table_capsule(address),
            "wish": property(lambda self: ctypes.addressof(self.told)),
        },
    )


@functools.cache
def table_type() -> type[Any]:
    """The type with the ordinary table, once: it is looked up by type."""
    return tabled("table")


def current_stream(handle: int | None) -> None:
    """What the table is to tell as the library's current stream; None is NULL."""
    ctypes.c_void_p.in_dll(library(), "tensors_stream").value = handle
