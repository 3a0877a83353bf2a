"""Sections 6.2 and 6.3: shrink and grow; and creation with several ids."""

from __future__ import annotations

import ctypes
import threading

from hostlib import UniqueId
from nccl_ranks import config

from conformance.rules import Needs, rule
from conformance.rules_collectives import words
from conformance.rules_creation import number_in
from conformance.trial import (
    ARGUMENT,
    CUDA,
    INT32,
    SUCCESS,
    SUM,
    USAGE,
    Rank,
    Trial,
    current_device,
    with_ranks,
)  # fmt: skip

DEFAULT, ABORT = 0, 1


def shrink(
    rank: Rank,
    exclude: list[int] | None,
    flags: int = DEFAULT,
    gives: int = SUCCESS,
    count: int | None = None,
) -> ctypes.c_void_p:
    child = rank.pointer()
    listed = (ctypes.c_int * len(exclude))(*exclude) if exclude else None
    number = len(exclude or ()) if count is None else count
    rank.call(
        "ncclCommShrink",
        rank.comm,
        listed,
        number,
        ctypes.byref(child),
        None,
        flags,
        gives=gives,
    )
    return child


def sums(rank: Rank, comm: ctypes.c_void_p, ranks: int) -> None:
    """An all-reduce of ones on a communicator."""
    data = rank.memory(4, words(1))
    rank.call("ncclAllReduce", data, data, 1, INT32, SUM, comm, rank.stream)
    rank.synchronize()
    rank.same("the sum of ones", data.read(), words(ranks))
    data.free()


@rule("6.2", "the exclude list is needed, and the caller is not in it", Needs.DEVICES)
def shrink_arguments(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        shrink(rank, None, gives=ARGUMENT, count=1)
        shrink(rank, [1 - rank.rank], gives=ARGUMENT, count=0)
        shrink(rank, [rank.rank], gives=ARGUMENT)
        rank.clean()

    with_ranks(trial, 2, body)


@rule(
    "6.2", "survivors keep their order, and those who are excluded do not call", Needs.DEVICES
)
def shrinks(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 1:
            return
        child = shrink(rank, [1])
        rank.same("its size", number_in(rank, child, "ncclCommCount"), 2)
        rank.same("its rank", number_in(rank, child), rank.rank // 2)
        sums(rank, child, 2)
        rank.call("ncclCommDestroy", child)

    with_ranks(trial, 3, body)


@rule("6.2", "the exclude list is sorted in place", Needs.HOST)
def sorts(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        if rank.rank in (1, 2):
            return
        child, listed = rank.pointer(), (ctypes.c_int * 2)(2, 1)
        rank.call("ncclCommShrink", rank.comm, listed, 2, ctypes.byref(child), None, DEFAULT)
        rank.same("the list", list(listed), [1, 2])
        rank.call("ncclCommAbort", child)

    with_ranks(trial, 4, body)


@rule("6.2", "with the abort flag what the parent waits for is ended first", Needs.DEVICES)
def shrink_aborts(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4)
        rank.all_reduce(data, data, 1)  # first contact, where there is one
        rank.synchronize()
        if rank.rank == 2:
            rank.abort()
            return
        rank.all_reduce(data, data, 1)  # rank 2 never comes
        child = shrink(rank, [2], ABORT)
        rank.synchronize()
        sums(rank, child, 2)
        rank.call("ncclCommAbort", child)
        rank.abort()
        data.free()

    with_ranks(trial, 3, body)


@rule("6.2", "the host engine refuses NULL, where NCCL crashes", Needs.HOST)
def shrink_null(trial: Trial) -> None:
    listed, child = (ctypes.c_int * 1)(0), trial.pointer()
    trial.call("ncclCommShrink", None, listed, 1, ctypes.byref(child), None, 0, gives=ARGUMENT)
    trial.clean()


@rule("6.3", "Grow: an output, ranks, and for a new rank its number and an id")
def grow_arguments(trial: Trial) -> None:
    out, some = ctypes.byref(trial.pointer()), ctypes.byref(trial.keep(UniqueId()))
    trial.call("ncclCommGrow", None, 2, some, 0, None, None, gives=ARGUMENT)
    trial.call("ncclCommGrow", None, 0, some, 0, out, None, gives=ARGUMENT)
    trial.call("ncclCommGrow", None, 2, None, 1, out, None, gives=ARGUMENT)
    trial.call("ncclCommGrow", None, 2, some, -1, out, None, gives=ARGUMENT)
    trial.call("ncclCommGrow", None, 2, some, 2, out, None, gives=ARGUMENT)
    trial.clean()


@rule("6.3", "Grow: what a new rank got wrong poisons the group, what is seen before does not")
def grow_poisons(trial: Trial) -> None:
    out, some = ctypes.byref(trial.pointer()), ctypes.byref(trial.keep(UniqueId()))
    for ranks, rank, end in ((0, 0, SUCCESS), (2, 2, ARGUMENT), (2, -1, ARGUMENT)):
        trial.call("ncclGroupStart")
        trial.call("ncclCommGrow", None, ranks, some, rank, out, None, gives=ARGUMENT)
        trial.call("ncclGroupEnd", gives=end)
    trial.clean()


@rule("6.3", "Grow without a device is a CUDA error, and poisons", Needs.NO_DEVICE)
def grow_without(trial: Trial) -> None:
    out, some = ctypes.byref(trial.pointer()), ctypes.byref(trial.keep(UniqueId()))
    trial.call("ncclGroupStart")
    trial.call("ncclCommGrow", None, 2, some, 1, out, None, gives=CUDA)
    trial.call("ncclGroupEnd", gives=CUDA)
    trial.clean()


@rule("6.3", "CommGetUniqueId refuses NULL, and does not poison")
def grow_id_null(trial: Trial) -> None:
    some = ctypes.byref(trial.keep(UniqueId()))
    trial.call("ncclGroupStart")
    trial.call("ncclCommGetUniqueId", None, some, gives=ARGUMENT)
    trial.call("ncclGroupEnd")
    trial.clean()


@rule("6.3", "existing ranks keep their numbers, and new ones get theirs", Needs.DEVICES)
def grows(trial: Trial) -> None:
    given = UniqueId()
    offered = threading.Event()

    def newcomer(_: int) -> None:
        with current_device(trial, 2):
            rank = Rank(trial.library, 2, 3)
            rank.call("cuStreamCreateWithPriority", ctypes.byref(rank.stream), 1, 0)
            offered.wait(5)
            rank.call(
                "ncclCommGrow", None, 3, ctypes.byref(given), 2, ctypes.byref(rank.comm), None
            )
            if rank.comm.value:
                sums(rank, rank.comm, 3)
                rank.end()
            rank.call("cuStreamDestroy_v2", rank.stream)
            trial.complaints += rank.complaints

    def body(rank: Rank) -> None:
        if rank.rank == 0:
            rank.call("ncclCommGetUniqueId", rank.comm, ctypes.byref(given))
            offered.set()
        child = rank.pointer()
        rank.call(
            "ncclCommGrow", rank.comm, 2, None, -1, ctypes.byref(child), None, gives=ARGUMENT
        )
        rank.call(
            "ncclCommGrow", rank.comm, 3, None, 0, ctypes.byref(child), None, gives=ARGUMENT
        )
        rank.call("ncclCommGrow", rank.comm, 3, None, -1, ctypes.byref(child), None)
        if child.value:
            rank.same("its rank", number_in(rank, child), rank.rank)
            sums(rank, child, 3)
            rank.call("ncclCommFinalize", child)
            rank.call("ncclCommDestroy", child)

    trial.together(newcomer, lambda _: with_ranks(trial, 2, body))


@rule(
    "4.1",
    "several ids: at least one and at most one a rank, the same list on all ranks",
    Needs.DEVICES,
)
def scalable(trial: Trial) -> None:
    lists = (UniqueId * 3)(*[trial.unique_id() for _ in range(3)])

    def join(number: int) -> None:
        with current_device(trial, number):
            comm = trial.pointer()
            arguments = (ctypes.byref(comm), 2, number)
            for count in (0, 3):
                trial.call(
                    "ncclCommInitRankScalable", *arguments, count, lists, None, gives=ARGUMENT
                )
            trial.call("ncclCommInitRankScalable", *arguments, 2, lists, None)
            trial.call("ncclCommAbort", comm)

    trial.together(join, join)


@rule(
    "1.1",
    "InitRankScalable without a device leaves the group depth open",
    Needs.NO_DEVICE,
    quirks="depth-leak",
)
def leak_of_scalable(trial: Trial) -> None:
    comm, unique = trial.pointer(), trial.unique_id()
    for count in (0, 1, 3):
        arguments = (ctypes.byref(comm), 2, 0, count, ctypes.byref(unique), None)
        trial.call("ncclCommInitRankScalable", *arguments, gives=CUDA)
        trial.call("ncclGroupEnd")
        trial.clean()


@rule(
    "7",
    "a revoked communicator ends what waits, refuses operations, and can be shrunk",
    Needs.DEVICES,
)
def revoked(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4)
        rank.all_reduce(data, data, 1)
        rank.synchronize()
        if rank.rank == 0:
            rank.all_reduce(data, data, 1)  # the other never comes
        rank.call("ncclCommRevoke", rank.comm, 1, gives=ARGUMENT)
        rank.call("ncclCommRevoke", rank.comm, 0)
        rank.synchronize()
        rank.call("ncclCommRevoke", rank.comm, 0, gives=ARGUMENT)
        rank.all_reduce(data, data, 1, gives=USAGE)
        rank.call("ncclGroupStart")
        rank.all_reduce(data, data, 1, gives=USAGE)
        rank.call("ncclGroupEnd", gives=USAGE)
        rank.call("ncclCommFinalize", rank.comm, gives=ARGUMENT)
        child = rank.pointer()
        rank.call("ncclCommSplit", rank.comm, 0, 0, ctypes.byref(child), None)
        sums(rank, child, 2)
        rank.call("ncclCommDestroy", child)
        rank.call("ncclCommDestroy", rank.comm)
        rank.comm.value = None
        data.free()

    with_ranks(trial, 2, body)


@rule("7", "Revoke of NULL is no error, whatever the flags")
def revoke_null(trial: Trial) -> None:
    for flags in (0, 5):
        trial.call("ncclCommRevoke", None, flags)
    trial.clean()


@rule("8", "suspend, resume and statistics refuse NULL")
def suspend_null(trial: Trial) -> None:
    trial.call("ncclGroupStart")
    trial.call("ncclCommSuspend", None, 1, gives=ARGUMENT)
    trial.call("ncclCommResume", None, gives=ARGUMENT)
    trial.call("ncclCommMemStats", None, 0, trial.bytes(8), gives=ARGUMENT)
    trial.call("ncclCommMemStats", None, 0, None, gives=ARGUMENT)
    trial.call("ncclGroupEnd")
    trial.clean()


@rule("8", "suspend twice, and resume of what is awake, are invalid usage", Needs.DEVICES)
def suspends(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        rank.call("ncclCommSuspend", rank.comm, 0)  # no bit that means anything
        rank.call("ncclCommResume", rank.comm, gives=USAGE)
        rank.call("ncclCommSuspend", rank.comm, 1)
        suspended = rank.keep(ctypes.c_uint64(7))
        rank.call("ncclCommMemStats", rank.comm, 1, ctypes.byref(suspended))
        rank.same("it says that it is suspended", suspended.value, 1)
        rank.call("ncclCommSuspend", rank.comm, 1, gives=USAGE)
        rank.call("ncclCommResume", rank.comm)
        rank.call("ncclCommMemStats", rank.comm, 1, ctypes.byref(suspended))
        rank.same("it says that it is awake", suspended.value, 0)
        rank.call("ncclCommMemStats", rank.comm, 9, ctypes.byref(suspended), gives=ARGUMENT)
        rank.call("ncclCommMemStats", rank.comm, 1, None, gives=ARGUMENT)
        sums(rank, rank.comm, 2)

    with_ranks(trial, 2, body)


@rule(
    "8", "a communicator that shares resources with a child cannot be suspended", Needs.DEVICES
)
def suspend_shared(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        child = rank.pointer()
        rank.call("ncclCommSplit", rank.comm, 0, 0, ctypes.byref(child), None)
        rank.call("ncclCommSuspend", rank.comm, 1, gives=USAGE)
        rank.call("ncclCommFinalize", child)
        rank.call("ncclCommDestroy", child)

    with_ranks(trial, 2, body, config(splitShare=1))
