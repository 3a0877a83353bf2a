"""Section 16: what a communicator tells of itself, and the host side of the device API."""

from __future__ import annotations

import ctypes

from structs import properties, property_of
from support.symbols import MultimemHandle, Team

from conformance.rules import Needs, rule
from conformance.rules_memory import PAGE, registered
from conformance.trial import ARGUMENT, USAGE, Rank, Trial, with_ranks

POINTERS = {
    "ncclGetLsaDevicePointer": (0, 0),
    "ncclGetPeerDevicePointer": (0, 0),
    "ncclGetLsaMultimemDevicePointer": (0,),
    "ncclGetMultimemDevicePointer": (0, MultimemHandle(None)),
}


@rule("16", "properties and device communicators refuse NULL, and do not poison")
def nulls(trial: Trial) -> None:
    trial.call("ncclGroupStart")
    for given in (properties(), properties(magic=1), properties(version=99999), None):
        trial.call("ncclCommQueryProperties", None, given, gives=ARGUMENT)
    trial.call("ncclDevCommCreate", None, None, None, gives=ARGUMENT)
    trial.call("ncclDevCommDestroy", None, None, gives=ARGUMENT)
    trial.call("ncclGroupEnd")
    trial.clean()


@rule("16", "pointers for kernels: a NULL window or output is refused, and nothing written")
def null_windows(trial: Trial) -> None:
    for name, more in POINTERS.items():
        out = trial.pointer(7)
        trial.call(name, None, *more, ctypes.byref(out), gives=ARGUMENT)
        trial.call(name, None, *more, None, gives=ARGUMENT)
        trial.same(f"what {name} wrote", out.value, 7)


@rule("16", "a communicator tells its place, and what it can do", Needs.HOST)
def tells(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        found = properties()
        rank.call("ncclCommQueryProperties", rank.comm, found)
        for name, wanted in (
            ("rank", rank.rank),
            ("nRanks", rank.ranks),
            ("cudaDev", rank.rank),
            ("deviceApiSupport", False),
            ("multimemSupport", False),
            ("nLsaTeams", rank.ranks),
            ("hostRmaSupport", True),
        ):
            rank.same(name, property_of(found, name), wanted)

    with_ranks(trial, 2, body)


@rule(
    "16", "properties: a wrong magic number or a newer version is invalid usage", Needs.DEVICES
)
def property_structs(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        for given in (properties(magic=1), properties(version=99999)):
            rank.call("ncclCommQueryProperties", rank.comm, given, gives=USAGE)
        rank.call("ncclCommQueryProperties", rank.comm, None, gives=ARGUMENT)

    with_ranks(trial, 1, body)


@rule("16", "without device API, communicators for kernels are invalid usage", Needs.HOST)
def no_device_api(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        rank.call("ncclDevCommCreate", rank.comm, properties(), rank.bytes(512), gives=USAGE)
        rank.call("ncclDevCommCreate", rank.comm, properties(magic=1), None, gives=USAGE)
        rank.call("ncclDevCommDestroy", rank.comm, rank.bytes(512), gives=ARGUMENT)

    with_ranks(trial, 1, body)


@rule("16", "where no load reaches a peer, each rank is alone in its team", Needs.HOST)
def teams(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        for name, wanted in (
            ("ncclTeamWorld", (rank.ranks, rank.rank, 1)),
            ("ncclTeamLsa", (1, 0, 1)),
            ("ncclTeamRail", (rank.ranks, rank.rank, 1)),
        ):
            team = rank.library.function(name)(rank.comm)
            rank.same(name, (team.nRanks, team.rank, team.stride), wanted)
        world = Team(rank.ranks, rank.rank, 1)
        for name, wanted_rank in (
            ("ncclTeamRankToWorld", 1),
            ("ncclTeamRankToLsa", 1 - rank.rank),
        ):
            found = rank.library.function(name)(rank.comm, world, 1)
            rank.same(name, found, wanted_rank)

    with_ranks(trial, 2, body)


@rule("16", "pointers for kernels: the own window is in reach, a peer's is not", Needs.HOST)
def pointers(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data, out = rank.memory(PAGE, registered=True), rank.pointer(7)
        window = registered(rank, data)
        result = ctypes.byref(out)
        rank.call("ncclGetPeerDevicePointer", window, 8, rank.rank, result)
        rank.same("the own", out.value, data.address + 8)
        rank.call("ncclGetLsaDevicePointer", window, 16, 0, result)
        rank.same("the own in its team", out.value, data.address + 16)
        rank.call("ncclGetPeerDevicePointer", window, 8, 1 - rank.rank, result)
        rank.same("the peer's", out.value, None)
        for peer in (-1, 2):
            rank.call("ncclGetPeerDevicePointer", window, 0, peer, result, gives=ARGUMENT)
        rank.call("ncclGetLsaDevicePointer", window, 0, 1, result, gives=ARGUMENT)
        rank.call("ncclGetLsaDevicePointer", window, PAGE, 0, result, gives=ARGUMENT)
        rank.call("ncclGetLsaMultimemDevicePointer", window, 0, result)
        rank.same("multicast", out.value, None)
        handle = MultimemHandle(data.address)
        rank.call("ncclGetMultimemDevicePointer", window, 0, handle, result)
        rank.same("multicast by its handle", out.value, None)
        rank.call("ncclCommWindowDeregister", rank.comm, window)
        rank.call("ncclGetLsaDevicePointer", window, 0, 0, result, gives=ARGUMENT)
        data.free()

    with_ranks(trial, 2, body)
