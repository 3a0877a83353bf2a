"""Sections 19 to 21: encryption, parameters, and what needs no device."""

from __future__ import annotations

import ctypes
import os

from structs import encryption

from conformance.rules import Needs, rule
from conformance.trial import ARGUMENT, SUCCESS, Trial, current_device

KEY = b"k" * 32
LISTED = (
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_TIMESTAMP_FORMAT",
    "NCCL_DEBUG_TIMESTAMP_LEVELS",
    "NCCL_SET_THREAD_NAME",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_DEBUG_LEVELS",
    "NCCL_DEBUG",
)
TEXTS = (
    "no error",
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "internal error - please report this issue to the NCCL developers",
    "invalid argument (run with NCCL_DEBUG=WARN for details)",
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "remote process exited or there was a network error",
    "NCCL operation in progress",
    "timeout",
)


@rule("0", "each result has its text, and a code that is none is called unknown")
def texts(trial: Trial) -> None:
    text = trial.library.function("ncclGetErrorString")
    for code, wanted in (
        *enumerate(TEXTS),
        (-1, "unknown result code"),
        (99, "unknown result code"),
    ):
        trial.same(f"the text of {code}", text(code).decode(), wanted)


@rule("0", "the library tells its version, and refuses NULL")
def version(trial: Trial) -> None:
    out = trial.number()
    trial.call("ncclGetVersion", ctypes.byref(out))
    trial.same("it is one of 2.x", out.value // 10000, 2)
    trial.call("ncclGetVersion", None, gives=ARGUMENT)


# ---- encryption


@rule("19", "NULL and mode 0 are accepted, again and again")
def no_encryption(trial: Trial) -> None:
    for given in (None, encryption(), encryption(mode=0, key=b"a"), encryption()):
        trial.call("ncclSetEncryption", given)


@rule("19", "a struct needs its magic number, whatever its size")
def encryption_magic(trial: Trial) -> None:
    for size in (0, 8, 12, 16, 32):
        trial.call("ncclSetEncryption", encryption(size, magic=1), gives=ARGUMENT)


@rule("19", "there are two modes, and members beyond the size are not looked at")
def encryption_modes(trial: Trial) -> None:
    for mode in (-1, 2, 7):
        trial.call("ncclSetEncryption", encryption(mode=mode), gives=ARGUMENT)
        trial.call("ncclSetEncryption", encryption(16, mode=mode))
        trial.call("ncclSetEncryption", encryption(20, mode=mode), gives=ARGUMENT)
    for size, code in (
        (16, SUCCESS),
        (20, ARGUMENT),
        (24, ARGUMENT),
        (32, SUCCESS),
        (4096, SUCCESS),
    ):
        trial.call("ncclSetEncryption", encryption(size, mode=1, key=KEY), gives=code)
    trial.call("ncclSetEncryption", encryption())


@rule("19", "a key has at least 32 bytes")
def keys(trial: Trial) -> None:
    for length, code in (
        (0, ARGUMENT),
        (1, ARGUMENT),
        (31, ARGUMENT),
        (32, SUCCESS),
        (1000, SUCCESS),
    ):
        trial.call("ncclSetEncryption", encryption(mode=1, key=b"a" * length), gives=code)
    trial.call("ncclSetEncryption", encryption(mode=1), gives=ARGUMENT)
    for number in (0, 23199, 99999):
        trial.call("ncclSetEncryption", encryption(version=number, mode=1, key=KEY))
    trial.unique_id()
    trial.call("ncclSetEncryption", encryption())


# ---- parameters


def read(trial: Trial, key: str) -> tuple[int, bytes | None, int]:
    value, length = trial.keep(ctypes.c_char_p(b"?")), trial.number()
    code = trial.library.function("ncclParamGetParameter")(
        key.encode(), ctypes.byref(value), ctypes.byref(length)
    )
    return code, value.value, length.value


def bound(trial: Trial, key: str) -> ctypes.c_void_p:
    handle = trial.pointer()
    trial.call("ncclParamBind", ctypes.byref(handle), trial.bytes(64, key.encode() + b"\0"))
    return handle


def set_variable(name: str, value: str | None) -> None:
    """As the C library sees it."""
    if value is None:
        os.unsetenv(name)
    else:
        os.putenv(name, value)


@rule("20", "seven parameters are listed, ten where NCCL_PARAM_DUMP_ALL says so")
def listed(trial: Trial) -> None:
    def names() -> list[str]:
        table, length = trial.keep(ctypes.POINTER(ctypes.c_char_p)()), trial.number()
        trial.call("ncclParamGetAllParameterKeys", ctypes.byref(table), ctypes.byref(length))
        return [table[i].decode() for i in range(length.value)]

    trial.same("the keys", names(), list(LISTED))
    set_variable("NCCL_PARAM_DUMP_ALL", "1")
    every = names()
    set_variable("NCCL_PARAM_DUMP_ALL", None)
    trial.same("how many with all", len(every), 10)
    trial.same("the others", set(every) >= set(LISTED), True)
    for arguments in ((None, trial.bytes(8)), (trial.bytes(8), None)):
        trial.call("ncclParamGetAllParameterKeys", *arguments, gives=ARGUMENT)


@rule("20", "a parameter read by its key has a text, and its length")
def by_key(trial: Trial) -> None:
    for key, text in (
        ("NCCL_DEBUG_FILE", b""),
        ("NCCL_DEBUG_TIMESTAMP_FORMAT", b"[%F %T] "),
        ("NCCL_DEBUG_TIMESTAMP_LEVELS", b"WARN,ATTN"),
        ("NCCL_SET_THREAD_NAME", b"FALSE"),
        ("NCCL_DEBUG_SUBSYS", b"INIT,ENV,BOOTSTRAP"),
        ("NCCL_DEBUG_LEVELS", b"NONE"),
        ("NCCL_DEBUG", b"<unknown>"),
    ):
        trial.same(key, read(trial, key), (0, text, len(text)))
    for key in ("nccl_debug", "NCCL_ALGO", "PYNCCL_NO_SUCH_PARAMETER", ""):
        trial.same(f"unknown {key!r}", read(trial, key), (ARGUMENT, None, 0))


@rule(
    "20", "what the environment says is read in words, any case, and what is no word voids it"
)
def spellings(trial: Trial) -> None:
    for key, spelt, text in (
        ("NCCL_DEBUG", "warn", b"WARN"),
        ("NCCL_DEBUG", " Attn ", b"ATTN"),
        ("NCCL_DEBUG", "2", b"<unknown>"),
        ("NCCL_DEBUG_SUBSYS", "all", b"ALL"),
        ("NCCL_DEBUG_SUBSYS", "net, init,", b"INIT,NET"),
        ("NCCL_DEBUG_SUBSYS", "^ALL", b"NONE"),
        ("NCCL_DEBUG_SUBSYS", "INIT,bogus", b"INIT,ENV,BOOTSTRAP"),
        ("NCCL_DEBUG_SUBSYS", "", b"NONE"),
        ("NCCL_DEBUG_LEVELS", "bogus,WARN,^INFO", b"WARN"),
        ("NCCL_DEBUG_LEVELS", "^WARN", b"VERSION,ATTN,INFO,ABORT,TRACE"),
        ("NCCL_DEBUG_TIMESTAMP_LEVELS", "bogus", b"WARN,ATTN"),
        ("NCCL_DEBUG_TIMESTAMP_FORMAT", "x", b"x"),
    ):
        set_variable(key, spelt)
        trial.same(f"{key}={spelt}", read(trial, key), (0, text, len(text)))
        set_variable(key, None)


@rule("20", "a typed getter needs the exact type")
def typed(trial: Trial) -> None:
    types = {
        f"{sign}{bits}": getattr(ctypes, f"c_{word}int{bits}")
        for sign, word in (("I", ""), ("U", "u"))
        for bits in (8, 16, 32, 64)
    }
    fits = {
        ("NCCL_DEBUG_TIMESTAMP_LEVELS", "U32"): 0x44,
        ("NCCL_DEBUG_LEVELS", "U32"): 0,
        ("NCCL_DEBUG_SUBSYS", "U64"): 0x1081,
    }
    for key in LISTED:
        handle = bound(trial, key)
        for name, kind in types.items():
            out = trial.keep(kind(77))
            wanted = fits.get((key, name))
            code = SUCCESS if wanted is not None else ARGUMENT
            trial.call(f"ncclParamGet{name}", handle, ctypes.byref(out), gives=code)
            trial.same(f"{key} as {name}", out.value, 77 if wanted is None else wanted)
        text = trial.keep(ctypes.c_char_p())
        code = SUCCESS if key.endswith(("_FILE", "_FORMAT")) else ARGUMENT
        trial.call("ncclParamGetStr", handle, ctypes.byref(text), gives=code)


@rule(
    "20", "a parameter is read as bytes: text with its NUL, and nothing where there is no room"
)
def raw(trial: Trial) -> None:
    get = trial.library.function("ncclParamGet")
    for key, size in (
        ("NCCL_DEBUG_FILE", 1),
        ("NCCL_DEBUG_TIMESTAMP_FORMAT", 9),
        ("NCCL_DEBUG_LEVELS", 4),
        ("NCCL_DEBUG_SUBSYS", 8),
        ("NCCL_SET_THREAD_NAME", 1),
        ("NCCL_DEBUG", 4),
    ):
        handle, out, length = bound(trial, key), trial.bytes(64), trial.number()
        trial.same(
            f"{key}, room",
            (get(handle, out, 64, ctypes.byref(length)), length.value),
            (0, size),
        )
        if size > 1:  # room for nothing is refused before anything is written
            found = (get(handle, out, size - 1, ctypes.byref(length)), length.value)
            trial.same(f"{key}, no room", found, (ARGUMENT, 0))


@rule("20", "NULL is refused everywhere, and an unknown key leaves the handle untouched")
def parameter_nulls(trial: Trial) -> None:
    handle, memory = bound(trial, "NCCL_DEBUG_SUBSYS"), trial.bytes(64)
    other = trial.pointer(77)
    trial.call(
        "ncclParamBind", ctypes.byref(other), trial.bytes(64, b"NO_SUCH\0"), gives=ARGUMENT
    )
    trial.same("the handle", other.value, 77)
    for name, arguments in (
        ("ncclParamBind", (ctypes.byref(other), None)),
        ("ncclParamBind", (None, trial.bytes(64, b"NCCL_DEBUG\0"))),
        ("ncclParamGetU64", (None, memory)),
        ("ncclParamGetU64", (handle, None)),
        ("ncclParamGetStr", (None, memory)),
        ("ncclParamGet", (None, memory, 64, memory)),
        ("ncclParamGet", (handle, None, 64, memory)),
        ("ncclParamGet", (handle, memory, 64, None)),
        ("ncclParamGet", (handle, memory, -1, memory)),
        ("ncclParamGetParameter", (None, memory, memory)),
        ("ncclParamGetParameter", (trial.bytes(64, b"NCCL_DEBUG\0"), None, memory)),
        ("ncclParamGetParameter", (trial.bytes(64, b"NCCL_DEBUG\0"), memory, None)),
    ):
        trial.call(name, *arguments, gives=ARGUMENT)


@rule("20", "the dump and the reload of the log's settings return nothing")
def dump(trial: Trial) -> None:
    trial.library.function("ncclResetDebugInit")()
    trial.same("it returns", trial.library.function("ncclParamDumpAll")(), None)


# ---- devices


@rule(
    "21",
    "ids, version, texts, groups, parameters and encryption need no device",
    Needs.NO_DEVICE,
)
def no_device(trial: Trial) -> None:
    trial.unique_id()
    trial.call("ncclGetVersion", ctypes.byref(trial.number()))
    trial.call("ncclGroupStart")
    trial.call("ncclGroupEnd")
    trial.call("ncclSetEncryption", encryption())
    trial.same("a parameter", read(trial, "NCCL_DEBUG_FILE"), (0, b"", 0))


@rule(
    "21",
    "a communicator's device is the thread's at the call, not at the end of the group",
    Needs.DEVICES,
)
def device_at_the_call(trial: Trial) -> None:
    comms = [trial.pointer() for _ in range(2)]
    unique = trial.unique_id()
    trial.call("ncclGroupStart")
    for rank, comm in enumerate(comms):
        with current_device(trial, 1 - rank):
            trial.call("ncclCommInitRank", ctypes.byref(comm), 2, unique, rank)
    trial.call("ncclGroupEnd")
    out = trial.number()
    for rank, comm in enumerate(comms):
        trial.call("ncclCommCuDevice", comm, ctypes.byref(out))
        trial.same(f"the device of rank {rank}", out.value, 1 - rank)
    for comm in comms:
        trial.call("ncclCommAbort", comm)
