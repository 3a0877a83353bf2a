"""What the host engine exports besides the vendors' names, by ctypes; see src/host/host.h."""

from __future__ import annotations

import ctypes

NAME_BYTES = 31
"""How much of a function's name a call has."""
LIVE = (
    "streams",
    "events",
    "communicators",
    "segments",
    "threads",
    "allocations",
    "work_items",
    "groups_open",
)


class Live(ctypes.Structure):
    """host_live_t: how many objects of each kind are alive."""

    _fields_ = tuple((name, ctypes.c_int64) for name in LIVE)


class Call(ctypes.Structure):
    """host_call_t: one exported call as the journal has it."""

    _fields_ = (
        ("time_ns", ctypes.c_uint64),
        ("thread", ctypes.c_uint64),
        ("function", ctypes.c_char * (NAME_BYTES + 1)),
        ("device", ctypes.c_int32),
        ("group_depth", ctypes.c_int32),
        ("result", ctypes.c_int32),
        ("datatype", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("count", ctypes.c_uint64),
        ("comm", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("object", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes what the control functions take and give; returns the library."""
    library.pn_host_set.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    library.pn_host_journal_start.argtypes = (ctypes.c_size_t,)
    library.pn_host_journal_read.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.pn_host_journal_read.restype = ctypes.c_size_t
    library.pn_host_live.argtypes = (ctypes.c_void_p,)
    library.pn_host_misuse_take.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    library.pn_host_misuse_take.restype = ctypes.c_int64
    library.pn_host_hold_driver_lock.argtypes = (ctypes.c_uint,)
    return library


def live(library: ctypes.CDLL) -> dict[str, int]:
    """How many objects of each kind the engine holds now."""
    counts = Live()
    library.pn_host_live(ctypes.byref(counts))
    return {name: getattr(counts, name) for name in LIVE}


def misuse(library: ctypes.CDLL) -> list[str]:
    """What the misuse detector has reported since the last call, and is forgotten by it."""
    text = ctypes.create_string_buffer(8192)
    count = int(library.pn_host_misuse_take(text, len(text)))
    told = text.value.decode(errors="replace").splitlines()
    return told if count <= len(told) else [*told, f"and {count - len(told)} more"]
