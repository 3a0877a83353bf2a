"""Sections 2 and 3: what waits, and the state of a communicator."""

from __future__ import annotations

import ctypes
import threading
import time

from conformance.rules import Needs, rule
from conformance.trial import (
    ARGUMENT,
    IN_PROGRESS,
    INT32,
    INTERNAL,
    NOT_READY,
    REMOTE,
    SUCCESS,
    USAGE,
    Rank,
    Trial,
    current_device,
    with_ranks,
)  # fmt: skip


@rule("2", "an abort by another thread ends an InitRank that waits for ranks", Needs.DEVICES)
def abort_of_init(trial: Trial) -> None:
    comm, unique = trial.pointer(), trial.unique_id()
    results: list[int] = []

    def join() -> None:
        with current_device(trial, 0):
            results.append(
                trial.library.function("ncclCommInitRank")(ctypes.byref(comm), 2, unique, 0)
            )

    thread = threading.Thread(target=join)
    thread.start()
    end = time.monotonic() + 5
    while comm.value is None and time.monotonic() < end:
        time.sleep(0.005)
    trial.same("the handle is there while the call waits", comm.value is not None, True)
    time.sleep(0.05)
    trial.call("ncclCommAbort", comm)
    thread.join(10)
    trial.same("the call has ended, with an error", bool(results) and results[0] != 0, True)


@rule("2", "a collective returns before its peers have come; its stream waits", Needs.DEVICES)
def calls_do_not_wait(trial: Trial) -> None:
    asked = threading.Event()

    def body(rank: Rank) -> None:
        data = rank.memory(4)
        rank.all_reduce(data, data, 1)  # first contact, where there is one
        rank.synchronize()
        if rank.rank == 1:
            asked.wait(5)
        rank.all_reduce(data, data, 1)
        if rank.rank == 0:
            rank.call("cuStreamQuery", rank.stream, gives=NOT_READY)
            asked.set()
        rank.synchronize()
        data.free()

    with_ranks(trial, 2, body)


@rule("3.1", "a communicator that was made is ready", Needs.DEVICES)
def ready(trial: Trial) -> None:
    with_ranks(trial, 2, lambda rank: rank.same("its state", rank.async_error(), SUCCESS))


@rule("3.2", "queries tell size, rank and device, and refuse NULL", Needs.DEVICES)
def queries(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        out = rank.number()
        for name, wanted in (
            ("ncclCommCount", rank.ranks),
            ("ncclCommUserRank", rank.rank),
            ("ncclCommCuDevice", rank.rank),
        ):
            rank.call(name, rank.comm, ctypes.byref(out))
            rank.same(name, out.value, wanted)
            rank.call(name, rank.comm, None, gives=ARGUMENT)

    with_ranks(trial, 2, body)


@rule("3.2", "a communicator in progress refuses queries", Needs.HOST, faults="")
def queries_in_progress(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        out = rank.number()
        if rank.rank == 0:
            rank.library.set("faults", "op:in_progress=3,rank=0")
        data = rank.memory(4)
        rank.all_reduce(data, data, 1, gives=(SUCCESS, IN_PROGRESS))
        rank.synchronize()
        if rank.rank == 0:
            rank.call("ncclCommCount", rank.comm, ctypes.byref(out), gives=ARGUMENT)
            for _ in range(3):
                rank.same("its state", rank.async_error(), 7)
            rank.same("its state then", rank.async_error(), SUCCESS)
            rank.call("ncclCommCount", rank.comm, ctypes.byref(out))
        data.free()

    with_ranks(trial, 2, body)


@rule("3.4", "an argument error leaves a blocking communicator healthy", Needs.DEVICES)
def healthy_after_a_bad_argument(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, b"\x01\0\0\0")
        rank.all_reduce(data, data, 1, dtype=12, gives=ARGUMENT)
        rank.same("its state", rank.async_error(), SUCCESS)
        rank.all_reduce(data, data, 1)
        rank.synchronize()
        rank.same("the sum", data.read(), b"\x02\0\0\0")
        data.free()

    with_ranks(trial, 2, body)


@rule("3.5", "GetAsyncError refuses a NULL communicator, and a NULL output")
def async_error_null(trial: Trial) -> None:
    trial.call("ncclCommGetAsyncError", None, trial.bytes(8), gives=ARGUMENT)
    trial.call("ncclCommGetAsyncError", None, None, gives=ARGUMENT)


@rule(
    "3.5",
    "an asynchronous error is the state, and fails the calls that follow",
    Needs.HOST,
    faults="",
)
def async_error_stays(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4)
        if rank.rank == 0:
            rank.library.set("faults", f"op:remote={REMOTE},rank=0")
            rank.all_reduce(data, data, 1)
            end = time.monotonic() + 5
            while rank.async_error() == SUCCESS and time.monotonic() < end:
                rank.call("cuStreamQuery", rank.stream, gives=NOT_READY)
                time.sleep(0.005)
            rank.same("its state", rank.async_error(), REMOTE)
            rank.all_reduce(data, data, 1, gives=REMOTE)
            rank.call("ncclCommCount", rank.comm, rank.bytes(8), gives=REMOTE)
        else:
            rank.all_reduce(data, data, 1)
        rank.abort()
        rank.synchronize()
        data.free()

    trial.library.set("runtime_connect", "0")
    with_ranks(trial, 2, body)
    trial.library.set("runtime_connect", "1")


@rule("3.6", "a group belongs to its thread")
def groups_of_threads(trial: Trial) -> None:
    trial.call("ncclGroupStart")
    thread = threading.Thread(target=trial.clean)
    thread.start()
    thread.join()
    trial.call("ncclGroupEnd")
    trial.clean()


@rule("3.7", "the last error belongs to the process: a NULL communicator is as good as any")
def last_error_of_the_process(trial: Trial) -> None:
    trial.call("ncclCommCount", None, trial.bytes(8), gives=ARGUMENT)
    trial.same("there is a text", isinstance(trial.library.last_error(), str), True)


@rule("3.7", "the last error is seen by other threads", Needs.HOST)
def last_error_of_other_threads(trial: Trial) -> None:
    trial.call("ncclCommCount", None, trial.bytes(8), gives=ARGUMENT)
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(trial.library.last_error()))
    thread.start()
    thread.join()
    trial.same("the text names the function", "ncclCommCount" in texts[0], True)


@rule("3.3", "after an abort its handle is refused", Needs.HOST)
def dead_handles(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        handle = rank.pointer(rank.comm.value)
        rank.abort()
        out = rank.number()
        rank.call("ncclCommCount", handle, ctypes.byref(out), gives=ARGUMENT)
        data = rank.memory(4)
        rank.call("ncclAllReduce", data, data, 1, INT32, 0, handle, rank.stream, gives=ARGUMENT)
        rank.call("ncclCommAbort", handle, gives=(ARGUMENT, USAGE, INTERNAL))
        data.free()

    with_ranks(trial, 2, body)
