"""Section 16: memory, registration and windows; section 21: which device a call uses."""

from __future__ import annotations

import ctypes

from conformance.rules import Needs, rule
from conformance.trial import ARGUMENT, CUDA, INTERNAL, USAGE, Rank, Trial, with_ranks

PAGE = 4096


def registered(
    rank: Rank, memory: object, size: int = PAGE, flags: int = 1, gives: int = 0
) -> ctypes.c_void_p:
    window = rank.pointer(77)
    rank.call(
        "ncclCommWindowRegister",
        rank.comm,
        memory,
        size,
        ctypes.byref(window),
        flags,
        gives=gives,
    )
    return window


@rule("16", "MemAlloc and MemFree without a device are CUDA errors", Needs.NO_DEVICE)
def memory_without(trial: Trial) -> None:
    trial.call("ncclMemAlloc", ctypes.byref(trial.pointer()), 1024, gives=CUDA)
    trial.call("ncclMemAlloc", None, 1024, gives=CUDA)
    trial.call("ncclMemAlloc", ctypes.byref(trial.pointer()), 0, gives=CUDA)
    trial.call("ncclMemFree", None, gives=CUDA)


@rule(
    "16", "MemAlloc gives memory of the current device; freeing NULL is no error", Needs.DEVICES
)
def memory(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(1 << 16, b"\x01", registered=True)
        rank.same("what was written", data.read()[:1], b"\x01")
        ordinal = rank.number()
        rank.call("cuPointerGetAttribute", ctypes.byref(ordinal), 9, data.address)
        rank.same("its device", ordinal.value, rank.rank)
        data.free()
        rank.call("ncclMemFree", None)
        rank.call("ncclMemAlloc", None, 16, gives=CUDA)

    with_ranks(trial, 2, body)


@rule(
    "16",
    "a registration is a handle; NULL is no error, one that is none is invalid usage",
    Needs.DEVICES,
)
def registrations(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data, handle = rank.memory(PAGE, registered=True), rank.pointer()
        rank.call("ncclCommRegister", rank.comm, data, PAGE, ctypes.byref(handle))
        rank.call("ncclCommDeregister", rank.comm, handle)
        rank.call("ncclCommDeregister", rank.comm, None)
        rank.call("ncclCommDeregister", rank.comm, rank.bytes(64), gives=USAGE)
        data.free()

    with_ranks(trial, 2, body)


@rule("16", "a window needs a buffer, a size and a place for its handle", Needs.DEVICES)
def window_arguments(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(PAGE, registered=True)
        rank.same("the window", registered(rank, None, gives=ARGUMENT).value, None)
        rank.same("the window", registered(rank, data, 0, gives=ARGUMENT).value, None)
        rank.call("ncclCommWindowRegister", rank.comm, data, PAGE, None, 1, gives=ARGUMENT)
        rank.clean()
        data.free()

    with_ranks(trial, 1, body)


@rule("16", "a window is made by all ranks together, and knows its buffer", Needs.HOST)
def windows(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data, pointer = rank.memory(2 * PAGE, registered=True), rank.pointer()
        window = registered(rank, data.address + PAGE)
        rank.call("ncclWinGetUserPtr", rank.comm, window, ctypes.byref(pointer))
        rank.same("the buffer", pointer.value, data.address + PAGE)
        rank.call("ncclWinGetUserPtr", rank.comm, window, None, gives=ARGUMENT)
        rank.call("ncclWinGetUserPtr", rank.comm, None, ctypes.byref(pointer), gives=ARGUMENT)
        rank.call("ncclCommWindowDeregister", rank.comm, window)
        rank.call("ncclCommWindowDeregister", rank.comm, None)
        rank.call("ncclCommWindowDeregister", rank.comm, window, gives=INTERNAL)
        data.free()

    with_ranks(trial, 2, body)


@rule("16", "in a group the window is there only at the end", Needs.HOST)
def windows_in_groups(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(PAGE, registered=True)
        rank.call("ncclGroupStart")
        window = registered(rank, data)
        rank.same("in the group", window.value, None)
        rank.call("ncclGroupEnd")
        rank.same("after it", window.value is not None, True)
        rank.call("ncclCommWindowDeregister", rank.comm, window)
        data.free()

    with_ranks(trial, 2, body)


@rule(
    "16",
    "other memory is a CUDA error, and a window off 4096 bytes an invalid argument, at the end",
    Needs.HOST,
)
def wrong_memory(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        own, ordinary = rank.memory(2 * PAGE, registered=True), rank.memory(PAGE)
        for memory, code in ((ordinary.address, CUDA), (own.address + 256, ARGUMENT)):
            rank.call("ncclGroupStart")
            registered(rank, memory)
            rank.call("ncclGroupEnd", gives=code)
        own.free()
        ordinary.free()

    with_ranks(trial, 2, body)


@rule("16", "a system without windows gives none, and says success", Needs.HOST, windows="0")
def no_windows(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data, pointer = rank.memory(PAGE, registered=True), rank.pointer(1)
        rank.same("the window", registered(rank, data).value, None)
        rank.call("ncclWinGetUserPtr", rank.comm, rank.bytes(8), ctypes.byref(pointer))
        rank.same("the buffer", pointer.value, None)
        data.free()

    with_ranks(trial, 2, body)
