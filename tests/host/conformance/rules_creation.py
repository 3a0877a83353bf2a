"""Sections 4 to 6: unique ids, creation, ncclConfig_t, and communicators made from others."""

from __future__ import annotations

import ctypes

from hostlib import UniqueId
from nccl_ranks import CONFIG_BYTES, config

from conformance.rules import Needs, rule
from conformance.trial import (
    ANY,
    ARGUMENT,
    CUDA,
    REMOTE,
    SUCCESS,
    SYSTEM,
    USAGE,
    Rank,
    Trial,
    current_device,
    with_ranks,
)  # fmt: skip

# ---- unique ids


@rule("4.1", "ids need no device, have 128 bytes, and no two are the same")
def ids(trial: Trial) -> None:
    first, second = bytes(trial.unique_id()), bytes(trial.unique_id())
    trial.same("their sizes", (len(first), len(second)), (128, 128))
    trial.same("they differ", first != second, True)
    trial.call("ncclGetUniqueId", None, gives=ARGUMENT)


@rule("4.1", "an id serves one init", Needs.HOST)
def ids_are_used_up(trial: Trial) -> None:
    unique, comm = trial.unique_id(), trial.pointer()
    with current_device(trial, 0):
        trial.call("ncclCommInitRank", ctypes.byref(comm), 1, unique, 0)
        again = trial.pointer()
        trial.call("ncclCommInitRank", ctypes.byref(again), 1, unique, 0, gives=(USAGE, REMOTE))
        if again.value:
            trial.call("ncclCommAbort", again)
        trial.call("ncclCommDestroy", comm)


@rule(
    "4.1",
    "ranks that disagree about their number, or have one number twice, are refused",
    Needs.HOST,
)
def disagreement(trial: Trial) -> None:
    for sizes, numbers in (((2, 3), (0, 1)), ((2, 2), (1, 1))):
        unique = trial.unique_id()
        results: list[int] = []

        def join(
            device: int,
            unique: UniqueId = unique,
            size: tuple[int, ...] = sizes,
            number: tuple[int, ...] = numbers,
            results: list[int] = results,
        ) -> None:
            with current_device(trial, device):
                comm = trial.pointer()
                code = trial.library.function("ncclCommInitRank")(
                    ctypes.byref(comm), size[device], unique, number[device]
                )
                results.append(code)
                if comm.value:
                    trial.library.function("ncclCommAbort")(comm)

        trial.together(join, join)
        trial.same("both fail", [code != 0 for code in results], [True, True])


@rule("4.1", "an id that is none is refused", Needs.HOST)
def no_id(trial: Trial) -> None:
    comm = trial.pointer()
    with current_device(trial, 0):
        trial.call(
            "ncclCommInitRank", ctypes.byref(comm), 1, UniqueId(), 0, gives=(SYSTEM, ARGUMENT)
        )
        if comm.value:
            trial.call("ncclCommAbort", comm)


# ---- init


@rule(
    "4.2",
    "InitRank without a device is known before its group: it does not poison",
    Needs.NO_DEVICE,
)
def cuda_before_the_group(trial: Trial) -> None:
    comm, unique = trial.pointer(), trial.unique_id()
    trial.call("ncclGroupStart")
    trial.call("ncclCommInitRank", ctypes.byref(comm), 1, unique, 0, gives=CUDA)
    trial.call("ncclGroupEnd")
    trial.clean()


@rule("4.2", "without a device CUDA is asked before any argument is looked at", Needs.NO_DEVICE)
def cuda_first(trial: Trial) -> None:
    comm, unique = trial.pointer(), trial.unique_id()
    for ranks, rank in ((1, 0), (2, 3), (0, 0), (1, -1)):
        trial.call("ncclCommInitRank", ctypes.byref(comm), ranks, unique, rank, gives=CUDA)
        trial.clean()
    trial.same("the handle", comm.value, None)


@rule("4.2", "NULL, a wrong size and a wrong rank are invalid arguments", Needs.DEVICES)
def init_arguments(trial: Trial) -> None:
    unique, comm = trial.unique_id(), trial.pointer()
    with current_device(trial, 0):
        trial.call("ncclCommInitRank", None, 1, unique, 0, gives=ARGUMENT)
        for ranks, rank in ((0, 0), (-1, 0), (1, -1), (1, 1), (2, 3)):
            comm.value = 77
            trial.call(
                "ncclCommInitRank", ctypes.byref(comm), ranks, unique, rank, gives=ARGUMENT
            )
            trial.clean()
        trial.call(
            "ncclCommInitRankConfig",
            ctypes.byref(comm),
            1,
            unique,
            0,
            config(magic=1),
            gives=ARGUMENT,
        )
        trial.clean()
        trial.call("ncclCommInitRank", ctypes.byref(comm), 1, unique, 0)
        trial.call("ncclCommDestroy", comm)


@rule("4.2", "an invalid argument of an init poisons the group around it", Needs.DEVICES)
def init_poisons(trial: Trial) -> None:
    unique, comm = trial.unique_id(), trial.pointer()
    with current_device(trial, 0):
        trial.call("ncclGroupStart")
        trial.call("ncclCommInitRank", ctypes.byref(comm), 0, unique, 0, gives=ARGUMENT)
        trial.call("ncclGroupEnd", gives=ARGUMENT)
        trial.clean()


@rule("4.2", "two ranks of a process on one device are invalid usage", Needs.DEVICES)
def device_twice(trial: Trial) -> None:
    unique = trial.unique_id()
    results: list[int] = []

    def join(number: int) -> None:
        with current_device(trial, 0):
            comm = trial.pointer()
            code = trial.library.function("ncclCommInitRank")(
                ctypes.byref(comm), 2, unique, number
            )
            results.append(code)
            if comm.value:
                trial.library.function("ncclCommAbort")(comm)

    trial.together(join, join)
    trial.same("both results", results, [USAGE, USAGE])


@rule("4.4", "NCCL_MULTI_RANK_GPU_ENABLE lets ranks share a device", Needs.HOST, multi_rank="1")
def device_shared(trial: Trial) -> None:
    unique = trial.unique_id()

    def join(number: int) -> None:
        with current_device(trial, 0):
            comm = trial.pointer()
            trial.call("ncclCommInitRank", ctypes.byref(comm), 2, unique, number)
            trial.call("ncclCommAbort", comm)

    trial.together(join, join)


@rule("4.3", "InitAll: its arguments", Needs.DEVICES)
def init_all(trial: Trial) -> None:
    comms = (ctypes.c_void_p * 2)()
    trial.call("cuInit", 0)
    for count, devices, code in (
        (-1, None, ARGUMENT),
        (2, (0, -1), ARGUMENT),
        (2, (0, 9999), ARGUMENT),
        (2, (1, 1), USAGE),
    ):
        listed = (ctypes.c_int * 2)(*devices) if devices else None
        trial.call("ncclCommInitAll", comms, count, listed, gives=code)
        trial.clean()


@rule("4.3", "InitAll restores the thread's device, and ranks follow the list", Needs.DEVICES)
def init_all_list(trial: Trial) -> None:
    with current_device(trial, 1):
        comms, devices = (ctypes.c_void_p * 2)(), (ctypes.c_int * 2)(1, 0)
        trial.call("ncclCommInitAll", comms, 2, devices)
        out = trial.number()
        trial.call("cuCtxGetDevice", ctypes.byref(out))
        trial.same("the thread's device", out.value, 1)
        for number, comm in enumerate(comms):
            trial.call("ncclCommCuDevice", comm, ctypes.byref(out))
            trial.same(f"the device of rank {number}", out.value, devices[number])
        for comm in comms:
            trial.call("ncclCommAbort", comm)


@rule(
    "4.3", "InitAll without a device is a CUDA error and leaves no group open", Needs.NO_DEVICE
)
def init_all_without(trial: Trial) -> None:
    for count in (1, -1):
        trial.call("ncclCommInitAll", (ctypes.c_void_p * 2)(), count, None, gives=CUDA)
        trial.clean()


# ---- ncclConfig_t


def try_config(trial: Trial, given: object, gives: int) -> None:
    comm, unique = trial.pointer(), trial.unique_id()
    trial.call("ncclCommInitRankConfig", ctypes.byref(comm), 1, unique, 0, given, gives=gives)
    if comm.value and gives == SUCCESS:
        trial.call("ncclCommDestroy", comm)
    trial.clean()


@rule(
    "5.1",
    "a struct needs its magic number, of which its size must reach the end",
    Needs.DEVICES,
)
def config_struct(trial: Trial) -> None:
    with current_device(trial, 0):
        for size, code in (
            (0, ARGUMENT),
            (8, ARGUMENT),
            (11, ARGUMENT),
            (12, SUCCESS),
            (16, SUCCESS),
        ):
            try_config(trial, config(size=size), code)
        try_config(trial, config(magic=0), ARGUMENT)
        try_config(trial, config(), SUCCESS)


@rule("5.1", "a struct from the future is taken, and its tail ignored", Needs.DEVICES)
def config_future(trial: Trial) -> None:
    with current_device(trial, 0):
        try_config(trial, config(size=CONFIG_BYTES + 64, version=40000), SUCCESS)


@rule("5.1", "members that the struct's version does not have are not looked at", Needs.DEVICES)
def config_versions(trial: Trial) -> None:
    with current_device(trial, 0):
        for member, since in (
            ("blocking", 21400), ("cgaClusterSize", 21700), ("CTAPolicy", 22700),
            ("collnetEnable", 22700), ("nChannelsPerNetPeer", 22800), ("graphUsageMode", 22900),
            ("numRmaCtx", 22900), ("maxP2pPeers", 23000), ("graphStreamOrdering", 23005),
            ("numRmaSig", 23100),
        ):  # fmt: skip
            try_config(trial, config(version=since - 1, **{member: -9}), SUCCESS)
            try_config(trial, config(version=since, **{member: -9}), ARGUMENT)
        try_config(trial, config(version=0, splitShare=9), ARGUMENT)


@rule("5.2", "values out of range are invalid arguments", Needs.DEVICES)
def config_values(trial: Trial) -> None:
    with current_device(trial, 0):
        for member, bad, good in (
            ("blocking", 2, 1), ("cgaClusterSize", -1, 0), ("minCTAs", 0, 1), ("maxCTAs", 0, 8),
            ("splitShare", 2, 1), ("shrinkShare", -1, 0), ("collnetEnable", 2, 1),
            ("nvlinkCentricSched", 2, 1), ("CTAPolicy", 4, 3), ("nvlsCTAs", 0, 4),
            ("nChannelsPerNetPeer", 65, 64), ("graphUsageMode", 3, 0), ("numRmaCtx", -1, 0),
            ("maxP2pPeers", 0, 1), ("graphStreamOrdering", 2, 0), ("launchOrderImplicit", 2, 1),
            ("rmaEagerInit", 2, 0), ("numRmaSig", -1, 2), ("hostCftMode", 4, 2),
        ):  # fmt: skip
            try_config(trial, config(**{member: bad}), ARGUMENT)
            try_config(trial, config(**{member: good}), SUCCESS)
        try_config(trial, config(minCTAs=9, maxCTAs=8), ARGUMENT)


# ---- split


def split(rank: Rank, color: int, key: int = 0, given: object = None) -> ctypes.c_void_p:
    child = rank.pointer()
    rank.call("ncclCommSplit", rank.comm, color, key, ctypes.byref(child), given)
    return child


def number_in(rank: Rank, comm: ctypes.c_void_p, function: str = "ncclCommUserRank") -> int:
    out = rank.number()
    rank.call(function, comm, ctypes.byref(out))
    return out.value


@rule(
    "6.1", "ranks of one colour become a communicator in the order of their keys", Needs.DEVICES
)
def split_order(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        child = split(rank, rank.rank % 2, key=-rank.rank)
        rank.same("its size", number_in(rank, child, "ncclCommCount"), 2)
        rank.same("its rank", number_in(rank, child), 1 - rank.rank // 2)
        rank.call("ncclCommAbort", child)
        child = split(rank, 5, key=7)
        rank.same("its rank where all keys are equal", number_in(rank, child), rank.rank)
        rank.call("ncclCommAbort", child)

    with_ranks(trial, 4, body)


@rule(
    "6.1",
    "colour -1 takes part and gets NULL; other negative colours are colours",
    Needs.DEVICES,
)
def split_colours(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        child = split(rank, -1 if rank.rank == 0 else -2)
        rank.same("there is a child", child.value is not None, rank.rank != 0)
        if child.value:
            rank.same("its size", number_in(rank, child, "ncclCommCount"), 2)
            rank.call("ncclCommAbort", child)

    with_ranks(trial, 3, body)


@rule(
    "6.1",
    "Split of NULL without a device is a CUDA error: the device is read first",
    Needs.NO_DEVICE,
)
def split_null_without(trial: Trial) -> None:
    trial.call("ncclCommSplit", None, 0, 0, ctypes.byref(trial.pointer()), None, gives=CUDA)
    trial.clean()


@rule("6.1", "Split of NULL, and into NULL, are invalid arguments", Needs.DEVICES)
def split_null(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        rank.call(
            "ncclCommSplit", None, 0, 0, ctypes.byref(rank.pointer()), None, gives=ARGUMENT
        )
        rank.call("ncclCommSplit", rank.comm, 0, 0, None, None, gives=ARGUMENT)
        rank.clean()

    with_ranks(trial, 1, body)


@rule("6.1", "an abort of one that shares resources aborts the family", Needs.DEVICES)
def split_shares(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        child = split(rank, 0)
        data = rank.memory(4)
        rank.call("ncclCommAbort", child)
        # The parent is being aborted: what is issued on it ends, and moves nothing.
        rank.all_reduce(data, data, 1, gives=ANY)
        rank.synchronize()
        rank.abort()
        data.free()

    with_ranks(trial, 2, body, config(splitShare=1))


@rule("6.1", "a child that shares nothing may be aborted alone", Needs.DEVICES)
def split_apart(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        child = split(rank, 0)
        rank.call("ncclCommAbort", child)
        data = rank.memory(4, b"\x01\0\0\0")
        rank.all_reduce(data, data, 1)
        rank.synchronize()
        rank.same("the parent's sum", data.read(), b"\x02\0\0\0")
        data.free()

    with_ranks(trial, 2, body)
