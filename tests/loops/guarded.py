"""Arrays in pages of their own: whoever touches one after its end crashes the process.

Each array ends where its page ends, between two pages that cannot be touched; when it dies the
page becomes like them, and its address never serves again.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
READ_WRITE, NONE = 3, 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Yard:
    """Address space for so many arrays, all of it out of bounds at first."""

    def __init__(self, count: int) -> None:
        size = (2 * count + 1) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = _libc.mmap(None, size, NONE, flags, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        self._next = int(base) + PAGE
        self._end = int(base) + size
        self.alive = 0

    def array(self, values: list[float]) -> NDArray[np.float32]:
        """A float32 array of its own page."""
        page = _Page(self, self._next, len(values))
        self._next += 2 * PAGE
        assert self._next <= self._end, "the yard is full"
        made = np.asarray(page)
        made[:] = values
        return made


class _Page:
    """What an array borrows its memory from, and holds."""

    def __init__(self, yard: Yard, address: int, count: int) -> None:
        self._yard, self._address = yard, address
        protect(address, READ_WRITE)
        yard.alive += 1
        data = address + PAGE - 4 * count
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "<f4",
            "shape": (count,),
            "data": (data, False),
        }

    def __del__(self) -> None:
        protect(self._address, NONE)
        self._yard.alive -= 1


def protect(address: int, access: int) -> None:
    """Change what may be done with a page."""
    if _libc.mprotect(address, PAGE, access):
        raise OSError(ctypes.get_errno(), "mprotect")
