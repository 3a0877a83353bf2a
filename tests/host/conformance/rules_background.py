"""Sections 1 and 3.3: non-blocking communicators."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

from nccl_ranks import config
from structs import descriptors

from conformance.rules import Needs, rule
from conformance.rules_collectives import words
from conformance.rules_memory import registered
from conformance.trial import (
    ARGUMENT,
    IN_PROGRESS,
    SUCCESS,
    Rank,
    Trial,
    current_device,
    with_ranks,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable


def settled(rank: Rank, comm: ctypes.c_void_p | None = None, limit_s: float = 10.0) -> int:
    """Poll a communicator until it is in progress no more; its state."""
    state = rank.number()
    poll = rank.library.function("ncclCommGetAsyncError")
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        poll(comm or rank.comm, ctypes.byref(state))
        if state.value != IN_PROGRESS:
            break
        time.sleep(0.001)
    return state.value


def in_background(trial: Trial, ranks: int, body: Callable[[Rank], None]) -> None:
    """Run the body on ranks with non-blocking communicators, which it ends with abort."""
    unique = trial.unique_id()
    made = [Rank(trial.library, number, ranks) for number in range(ranks)]

    def one(number: int) -> None:
        rank = made[number]
        try:
            with current_device(rank, number):
                rank.call("cuStreamCreateWithPriority", ctypes.byref(rank.stream), 1, 0)
                rank.call(
                    "ncclCommInitRankConfig",
                    ctypes.byref(rank.comm), ranks, unique, number, config(blocking=0),
                    gives=(SUCCESS, IN_PROGRESS),
                )  # fmt: skip
                rank.same("the state once made", settled(rank), SUCCESS)
                body(rank)
                if rank.comm.value:
                    rank.abort()
                rank.call("cuStreamDestroy_v2", rank.stream)
        except Exception as error:
            rank.complaints.append(f"{type(error).__name__}: {error}")

    trial.together(*[one] * ranks)
    for rank in made:
        trial.complaints += [f"rank {rank.rank}: {text}" for text in rank.complaints]


def collective(rank: Rank, data: object) -> None:
    """An all-reduce, and the wait until it was launched."""
    rank.all_reduce(data, data, 1, gives=(SUCCESS, IN_PROGRESS))
    rank.same("the state once launched", settled(rank), SUCCESS)


@rule(
    "3.3",
    "creation answers that it is in progress, and refuses queries until it is done",
    Needs.DEVICES,
)
def creation(trial: Trial) -> None:
    comm, unique = trial.pointer(), trial.unique_id()
    with current_device(trial, 0):
        trial.call(
            "ncclCommInitRankConfig",
            ctypes.byref(comm),
            2,
            unique,
            0,
            config(blocking=0),
            gives=IN_PROGRESS,
        )
        trial.same("the handle is there", comm.value is not None, True)
        trial.call("ncclCommCount", comm, ctypes.byref(trial.number()), gives=ARGUMENT)
        state = trial.number()
        trial.call("ncclCommGetAsyncError", comm, ctypes.byref(state))
        trial.same("its state", state.value, IN_PROGRESS)
        trial.call("ncclCommAbort", comm)
    trial.clean()


@rule("3.3", "a collective is on its stream once the state says so", Needs.DEVICES)
def launched(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, words(1))
        collective(rank, data)
        rank.synchronize()
        rank.same("the sum", data.read(), words(2))
        data.free()

    in_background(trial, 2, body)


@rule("3.3", "Split answers success while it runs; the parent is polled", Needs.DEVICES)
def splits(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        child = rank.pointer()
        rank.call("ncclCommSplit", rank.comm, 0, 0, ctypes.byref(child), None)
        rank.same("the parent's state", settled(rank), SUCCESS)
        rank.same("the child is there", child.value is not None, True)
        rank.same("the child's state", settled(rank, child), SUCCESS)
        rank.call("ncclCommAbort", child)

    in_background(trial, 2, body)


@rule("3.3", "Finalize is in progress until all ranks have come", Needs.DEVICES)
def finalizes(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 1:
            time.sleep(0.1)
        rank.call("ncclCommFinalize", rank.comm, gives=(SUCCESS, IN_PROGRESS))
        rank.same("the state", settled(rank), SUCCESS)
        rank.call("ncclCommDestroy", rank.comm)
        rank.comm.value = None

    in_background(trial, 2, body)


@rule("3.4", "an argument error of a non-blocking communicator is for ever", Needs.DEVICES)
def for_ever(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4)
        rank.all_reduce(data, data, 1, dtype=99, gives=ARGUMENT)
        rank.same("the state", settled(rank), ARGUMENT)
        rank.all_reduce(data, data, 1, gives=ARGUMENT)
        data.free()

    in_background(trial, 2, body)


@rule(
    "1 rule 9",
    "the end of a non-blocking group is in progress; an empty one is done",
    Needs.DEVICES,
)
def group_end(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, words(3))
        rank.call("ncclGroupStart")
        rank.all_reduce(data, data, 0)
        rank.call("ncclGroupEnd")
        rank.call("ncclGroupStart")
        rank.all_reduce(data, data, 1)  # the state before the launch, which is success
        rank.call("ncclGroupEnd", gives=IN_PROGRESS)
        rank.same("the state", settled(rank), SUCCESS)
        rank.synchronize()
        rank.same("the sum", data.read(), words(6))
        data.free()

    in_background(trial, 2, body)


@rule(
    "16",
    "non-blocking: registering a window answers success, and the window comes later",
    Needs.HOST,
)
def windows(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4096, registered=True)
        window = registered(rank, data)
        rank.same("the state", settled(rank), SUCCESS)
        rank.same("the window is there", window.value is not None, True)
        rank.call("ncclCommWindowDeregister", rank.comm, window)
        data.free()

    in_background(trial, 2, body)


@rule(
    "16",
    "while a communicator is being made, registering answers success and gives none",
    Needs.HOST,
)
def windows_too_early(trial: Trial) -> None:
    rank = Rank(trial.library, 0, 2)
    with current_device(trial, 0):
        rank.call("cuStreamCreateWithPriority", ctypes.byref(rank.stream), 1, 0)
        data, unique = rank.memory(4096, registered=True), rank.unique_id()
        name, comm = "ncclCommInitRankConfig", ctypes.byref(rank.comm)
        rank.call(name, comm, 2, unique, 0, config(blocking=0), gives=IN_PROGRESS)
        rank.same("the window", registered(rank, data).value, None)
        rank.abort()
        data.free()
        rank.call("cuStreamDestroy_v2", rank.stream)
    trial.complaints += rank.complaints


@rule(
    "17",
    "non-blocking: one-sided operations are launched in the background",
    Needs.HOST,
)
def one_sided(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4096, registered=True)
        window = registered(rank, data)
        rank.same("the state", settled(rank), SUCCESS)
        rank.call(
            "ncclSignal", 1 - rank.rank, 0, 0, 0, rank.comm, rank.stream,
            gives=(SUCCESS, IN_PROGRESS),
        )  # fmt: skip
        rank.same("the state once launched", settled(rank), SUCCESS)
        waits = descriptors((1, 1 - rank.rank, 0, 0))
        rank.call(
            "ncclWaitSignal", 1, waits, rank.comm, rank.stream, gives=(SUCCESS, IN_PROGRESS)
        )
        rank.same("the state once waiting", settled(rank), SUCCESS)
        rank.synchronize()
        rank.call("ncclCommWindowDeregister", rank.comm, window)
        data.free()

    in_background(trial, 2, body)


@rule(
    "1 rule 8",
    "jobs of blocking and of non-blocking communicators do not mix in a group",
    Needs.DEVICES,
)
def mixed_jobs(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        unique, other = rank.unique_id(), rank.pointer()
        rank.call(
            "ncclCommInitRankConfig",
            ctypes.byref(other),
            1,
            unique,
            0,
            config(blocking=0),
            gives=(SUCCESS, IN_PROGRESS),
        )
        rank.same("the other's state", settled(rank, other), SUCCESS)
        a, b = rank.pointer(), rank.pointer()
        rank.call("ncclGroupStart")
        rank.call("ncclCommSplit", rank.comm, 0, 0, ctypes.byref(a), None)
        rank.call("ncclCommSplit", other, 0, 0, ctypes.byref(b), None, gives=ARGUMENT)
        rank.call("ncclGroupEnd", gives=ARGUMENT)
        rank.clean()
        rank.call("ncclCommAbort", other)

    with_ranks(trial, 1, body)
