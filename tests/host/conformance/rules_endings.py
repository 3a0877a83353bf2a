"""Sections 7 and 8: how communicators end, and how they rest."""

from __future__ import annotations

import ctypes
import time

from conformance.rules import Needs, rule
from conformance.trial import ANY, ARGUMENT, NOT_READY, SUCCESS, USAGE, Rank, Trial, with_ranks

for name in ("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"):

    def of_null(trial: Trial, name: str = name) -> None:
        trial.call(name, None)
        trial.clean()

    rule("7", f"{name} of NULL is no error")(of_null)


@rule("7", "Finalize twice is an invalid argument", Needs.DEVICES)
def finalize_twice(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        rank.call("ncclCommFinalize", rank.comm)
        rank.call("ncclCommFinalize", rank.comm, gives=ARGUMENT)
        rank.call("ncclCommDestroy", rank.comm)
        rank.comm.value = None
        rank.clean()

    with_ranks(trial, 2, body)


@rule("7", "Finalize waits for what was issued", Needs.DEVICES)
def finalize_flushes(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, b"\x01\0\0\0")
        for _ in range(8):
            rank.all_reduce(data, data, 1)
        rank.call("ncclCommFinalize", rank.comm)
        rank.call("cuStreamQuery", rank.stream)
        rank.same("the sum", data.read(), (1 << 8).to_bytes(4, "little"))
        rank.call("ncclCommDestroy", rank.comm)
        rank.comm.value = None
        data.free()

    with_ranks(trial, 2, body)


@rule("7", "a finalized communicator takes no operation", Needs.DEVICES)
def finalized(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4)
        rank.call("ncclCommFinalize", rank.comm)
        rank.all_reduce(data, data, 1, gives=(ARGUMENT, USAGE))
        rank.call("ncclCommDestroy", rank.comm)
        rank.comm.value = None
        data.free()

    with_ranks(trial, 2, body)


@rule("7", "Destroy without Finalize finalizes first", Needs.DEVICES)
def destroy_flushes(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, b"\x03\0\0\0")
        rank.all_reduce(data, data, 1)
        rank.call("ncclCommDestroy", rank.comm)
        rank.comm.value = None
        rank.synchronize()
        rank.same("the sum", data.read(), b"\x06\0\0\0")
        data.free()

    with_ranks(trial, 2, body)


@rule("7", "an abort ends a kernel that waits for its peer", Needs.DEVICES)
def abort_ends_kernels(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4)
        rank.all_reduce(data, data, 1)
        rank.synchronize()
        if rank.rank == 0:
            rank.all_reduce(data, data, 1)
            time.sleep(0.02)
            rank.call("cuStreamQuery", rank.stream, gives=NOT_READY)
        rank.abort()
        rank.synchronize()
        data.free()

    with_ranks(trial, 2, body)


@rule("7", "Destroy of a communicator in error is refused; Abort is not", Needs.HOST, faults="")
def destroy_in_error(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4)
        if rank.rank == 0:
            rank.library.set("faults", "op:remote=6,rank=0")
            rank.all_reduce(data, data, 1, gives=ANY)
            end = time.monotonic() + 5
            while rank.async_error() == SUCCESS and time.monotonic() < end:
                time.sleep(0.005)
            rank.call("ncclCommDestroy", rank.comm, gives=6)
            rank.clean()
        rank.abort()
        rank.synchronize()
        data.free()

    trial.library.set("runtime_connect", "0")
    with_ranks(trial, 2, body)
    trial.library.set("runtime_connect", "1")


@rule("7", "a destroyed handle is dead", Needs.HOST)
def destroyed_handles(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        handle = rank.pointer(rank.comm.value)
        rank.end()
        rank.call("ncclCommCount", handle, ctypes.byref(rank.number()), gives=ARGUMENT)
        rank.call("ncclCommFinalize", handle, gives=ARGUMENT)
        rank.clean()

    with_ranks(trial, 2, body)
