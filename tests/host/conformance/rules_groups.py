"""Section 1: groups."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from structs import coll_config, estimate, simulation

from conformance.rules import Needs, rule
from conformance.trial import (
    ARGUMENT,
    CUDA,
    FLOAT32,
    INT32,
    SUCCESS,
    SUM,
    USAGE,
    Rank,
    Trial,
    with_ranks,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable

# Operations on a NULL communicator whose other arguments are in order, `B` being memory.
B = "memory"
OPERATIONS: dict[str, tuple[Any, ...]] = {
    "ncclAllReduce": (B, B, 1, FLOAT32, SUM, None, None),
    "ncclReduce": (B, B, 1, FLOAT32, SUM, 0, None, None),
    "ncclBroadcast": (B, B, 1, FLOAT32, 0, None, None),
    "ncclBcast": (B, 1, FLOAT32, 0, None, None),
    "ncclAllGather": (B, B, 1, FLOAT32, None, None),
    "ncclReduceScatter": (B, B, 1, FLOAT32, SUM, None, None),
    "ncclAlltoAll": (B, B, 1, FLOAT32, None, None),
    "ncclGather": (B, B, 1, FLOAT32, 0, None, None),
    "ncclScatter": (B, B, 1, FLOAT32, 0, None, None),
    "ncclAllReduceConfig": (B, B, 1, FLOAT32, SUM, None, None, None),
    "ncclReduceConfig": (B, B, 1, FLOAT32, SUM, 0, None, None, None),
    "ncclBroadcastConfig": (B, B, 1, FLOAT32, 0, None, None, None),
    "ncclAllGatherConfig": (B, B, 1, FLOAT32, None, None, None),
    "ncclReduceScatterConfig": (B, B, 1, FLOAT32, SUM, None, None, None),
    "ncclAlltoAllConfig": (B, B, 1, FLOAT32, None, None, None),
    "ncclGatherConfig": (B, B, 1, FLOAT32, 0, None, None, None),
    "ncclScatterConfig": (B, B, 1, FLOAT32, 0, None, None, None),
    "ncclSend": (B, 1, FLOAT32, 0, None, None),
    "ncclRecv": (B, 1, FLOAT32, 0, None, None),
    "ncclPutSignal": (B, 1, FLOAT32, 0, None, 0, 0, 0, 0, None, None),
    "ncclSignal": (0, 0, 0, 0, None, None),
    "ncclWaitSignal": (1, B, None, None),
}
# Calls that know nothing of groups.
BYSTANDERS: dict[str, tuple[Any, ...]] = {
    "ncclCommCount": (None, B),
    "ncclCommUserRank": (None, B),
    "ncclCommCuDevice": (None, B),
    "ncclCommGetAsyncError": (None, B),
    "ncclRedOpCreatePreMulSum": (B, B, FLOAT32, 1, None),
    "ncclRedOpDestroy": (77, None),
    "ncclCommRegister": (None, B, 64, B),
    "ncclCommDeregister": (None, B),
    "ncclCommWindowRegister": (None, B, 64, B, 1),
    "ncclCommWindowDeregister": (None, B),
    "ncclWinGetUserPtr": (None, B, B),
    "ncclGetUniqueId": (None,),
    "ncclGetVersion": (None,),
    "ncclParamBind": (None, None),
}


def fill(trial: Trial, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(trial.bytes(256) if value is B else value for value in arguments)


def bad_operation(trial: Trial) -> None:
    trial.call("ncclAllReduce", *fill(trial, OPERATIONS["ncclAllReduce"]), gives=ARGUMENT)


@rule("1 rule 1", "Start always succeeds, and groups nest")
def nesting(trial: Trial) -> None:
    for _ in range(3):
        trial.call("ncclGroupStart")
    for _ in range(3):
        trial.call("ncclGroupEnd")
    trial.clean()


@rule("1 rule 2", "an operation outside a group has a group of its own, of which nothing stays")
def own_group(trial: Trial) -> None:
    bad_operation(trial)
    trial.call("ncclGroupStart")
    trial.call("ncclGroupEnd")
    trial.clean()


@rule("1 rule 2", "an operation outside a group is launched at once", Needs.DEVICES)
def at_once(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, bytes([rank.rank + 1, 0, 0, 0]))
        rank.all_reduce(data, data, 1)
        rank.synchronize()
        rank.same("the sum", data.read(), bytes([3, 0, 0, 0]))
        data.free()

    with_ranks(trial, 2, body)


@rule("1 rule 3", "of two errors in a group the last one is kept", Needs.NO_DEVICE)
def last_error_wins(trial: Trial) -> None:
    out, unique = ctypes.byref(trial.pointer()), ctypes.byref(trial.unique_id())
    trial.call("ncclGroupStart")
    bad_operation(trial)
    trial.call("ncclCommGrow", None, 2, unique, 1, out, None, gives=CUDA)
    trial.call("ncclGroupEnd", gives=CUDA)
    trial.call("ncclGroupStart")
    trial.call("ncclCommGrow", None, 2, unique, 1, out, None, gives=CUDA)
    bad_operation(trial)
    trial.call("ncclGroupEnd", gives=ARGUMENT)
    trial.clean()


@rule("1 rule 4", "End at depth 0 is invalid usage and changes nothing")
def end_alone(trial: Trial) -> None:
    trial.clean()
    trial.clean()


@rule("1 rule 5", "an inner End reports no error and clears none")
def inner_end(trial: Trial) -> None:
    trial.call("ncclGroupStart")
    trial.call("ncclGroupStart")
    bad_operation(trial)
    trial.call("ncclGroupEnd")
    trial.call("ncclGroupEnd", gives=ARGUMENT)
    trial.clean()


@rule("1 rule 6", "an error in a group makes the outermost End return it, once")
def error_at_the_end(trial: Trial) -> None:
    trial.call("ncclGroupStart")
    bad_operation(trial)
    trial.call("ncclGroupEnd", gives=ARGUMENT)
    trial.clean()
    trial.call("ncclGroupStart")
    trial.call("ncclGroupEnd")


@rule("1 rule 6", "an error in a group keeps all of it from being launched", Needs.DEVICES)
def nothing_is_launched(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, b"\x05\0\0\0")
        rank.call("ncclGroupStart")
        rank.all_reduce(data, data, 1)
        rank.all_reduce(data, data, 1, dtype=99, gives=ARGUMENT)
        rank.all_reduce(data, data, 1)
        rank.call("ncclGroupEnd", gives=ARGUMENT)
        rank.synchronize()
        rank.same("the data", data.read(), b"\x05\0\0\0")
        rank.all_reduce(data, data, 1)
        rank.synchronize()
        rank.same("the sum of the next", data.read(), b"\x0a\0\0\0")
        data.free()

    with_ranks(trial, 2, body)


def poisons(function: str) -> Callable[[Trial], None]:
    def body(trial: Trial) -> None:
        trial.call(function, *fill(trial, OPERATIONS[function]), gives=ARGUMENT)
        trial.clean()
        trial.call("ncclGroupStart")
        trial.call(function, *fill(trial, OPERATIONS[function]), gives=ARGUMENT)
        trial.call("ncclGroupEnd", gives=ARGUMENT)
        trial.clean()

    return body


def passes_by(function: str) -> Callable[[Trial], None]:
    def body(trial: Trial) -> None:
        trial.call("ncclGroupStart")
        trial.call(function, *fill(trial, BYSTANDERS[function]), gives=ARGUMENT)
        trial.call("ncclGroupEnd")
        trial.clean()

    return body


for name in OPERATIONS:
    rule("1 rule 7", f"{name} on NULL is an invalid argument, and poisons its group")(
        poisons(name)
    )
for name in BYSTANDERS:
    rule("1 rule 7", f"{name} refuses NULL, and does not poison the group around it")(
        passes_by(name)
    )


@rule("1 rule 7", "a bad config of a collective does not poison; its NULL communicator does")
def config_first(trial: Trial) -> None:
    arguments = fill(trial, OPERATIONS["ncclAllReduceConfig"])[:-1]
    for given, end in ((coll_config(magic=1), SUCCESS), (coll_config(), ARGUMENT)):
        trial.call("ncclGroupStart")
        trial.call("ncclAllReduceConfig", *arguments, given, gives=ARGUMENT)
        trial.call("ncclGroupEnd", gives=end)
    trial.clean()


class Crowd:
    """All ranks on one thread, as ncclCommInitAll makes them."""

    def __init__(self, trial: Trial, ranks: int) -> None:
        self.trial = trial
        self.comms = (ctypes.c_void_p * ranks)()
        self.contexts = []
        self.ranks = []
        for device in range(ranks):
            context = trial.pointer()
            trial.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self.contexts.append(context)
        trial.call("ncclCommInitAll", self.comms, ranks, None)
        for number in range(ranks):
            rank = Rank(trial.library, number, ranks)
            rank.comm.value = self.comms[number]
            self.on(number)
            trial.call("cuStreamCreateWithPriority", ctypes.byref(rank.stream), 1, 0)
            self.ranks.append(rank)

    def on(self, device: int) -> None:
        self.trial.call("cuCtxSetCurrent", self.contexts[device])

    def close(self) -> None:
        for rank in self.ranks:
            self.on(rank.rank)
            self.trial.call("cuStreamDestroy_v2", rank.stream)
        self.trial.call("ncclGroupStart")
        for rank in self.ranks:
            self.trial.call("ncclCommFinalize", rank.comm)
        self.trial.call("ncclGroupEnd")
        for rank in self.ranks:
            self.trial.call("ncclCommDestroy", rank.comm)
        self.trial.call("cuCtxSetCurrent", None)
        for device in range(len(self.ranks)):
            self.trial.call("cuDevicePrimaryCtxRelease_v2", device)
        for rank in self.ranks:
            self.trial.seen += rank.seen
            self.trial.complaints += rank.complaints


def device_of_thread(trial: Trial) -> int:
    device = trial.number()
    trial.call("cuCtxGetDevice", ctypes.byref(device))
    return device.value


@rule("1 rule 10", "a group restores the thread's device", Needs.DEVICES)
def device_restored(trial: Trial) -> None:
    trial.call("cuInit", 0)
    crowd = Crowd(trial, 2)
    data = []
    for rank in crowd.ranks:
        crowd.on(rank.rank)
        data.append(rank.memory(4, bytes([rank.rank + 1, 0, 0, 0])))
    crowd.on(1)
    trial.call("ncclGroupStart")
    for rank, memory in zip(crowd.ranks, data, strict=True):
        rank.all_reduce(memory, memory, 1)
    trial.call("ncclGroupEnd")
    trial.same("the device after the group", device_of_thread(trial), 1)
    for rank, memory in zip(crowd.ranks, data, strict=True):
        crowd.on(rank.rank)
        rank.synchronize()
        rank.same("the sum", memory.read(), bytes([3, 0, 0, 0]))
        memory.free()
    crowd.close()


@rule("1 rule 11", "when one job of a group fails, the others end too", Needs.DEVICES)
def jobs_fail_together(trial: Trial) -> None:
    trial.call("cuInit", 0)
    crowd = Crowd(trial, 2)
    children = [trial.pointer() for _ in crowd.ranks]
    trial.call("ncclGroupStart")
    trial.call("ncclCommSplit", crowd.ranks[0].comm, 0, 0, ctypes.byref(children[0]), None)
    trial.call("ncclCommSplit", crowd.ranks[1].comm, 0, 0, None, None, gives=ARGUMENT)
    trial.call("ncclGroupEnd", gives=ARGUMENT)
    trial.same("the child", children[0].value, None)
    trial.clean()
    crowd.close()


# ---- leaked depth


@rule(
    "1.1", "InitRankConfig without a device leaves the group depth open", Needs.NO_DEVICE,
    quirks="depth-leak",
)  # fmt: skip
def leak_of_init(trial: Trial) -> None:
    unique, comm = trial.unique_id(), trial.pointer()
    trial.call("ncclCommInitRankConfig", ctypes.byref(comm), 1, unique, 0, None, gives=CUDA)
    trial.call("ncclGroupEnd")  # this one repairs it
    trial.clean()


@rule("1.1", "InitRank without a device leaves nothing open", Needs.NO_DEVICE)
def no_leak_of_init(trial: Trial) -> None:
    comm = trial.pointer()
    trial.call("ncclCommInitRank", ctypes.byref(comm), 1, trial.unique_id(), 0, gives=CUDA)
    trial.clean()


@rule("1.1", "the host engine leaks no depth of its own accord", Needs.HOST)
def no_leak_by_default(trial: Trial) -> None:
    unique, comm = trial.unique_id(), trial.pointer()
    trial.call("ncclCommInitRankConfig", ctypes.byref(comm), 0, unique, 0, None, gives=ARGUMENT)
    trial.clean()


# ---- simulation


@rule("1.2", "SimulateEnd of NULL is an End")
def simulate_null(trial: Trial) -> None:
    trial.call("ncclGroupSimulateEnd", None, gives=USAGE)
    trial.call("ncclGroupStart")
    trial.call("ncclGroupSimulateEnd", None)
    trial.clean()


@rule("1.2", "a struct that was not initialised is refused when the depth is used up already")
def simulate_magic(trial: Trial) -> None:
    for info in (simulation(magic=1), simulation(size=0), simulation(size=8)):
        trial.call("ncclGroupStart")
        trial.call("ncclGroupSimulateEnd", info, gives=ARGUMENT)
        trial.clean()


@rule("1.2", "any size from 12 bytes on is taken, and any version")
def simulate_sizes(trial: Trial) -> None:
    for size in (12, 15, 16, 20, 24, 4096, 1 << 40):
        trial.call("ncclGroupStart")
        trial.call("ncclGroupSimulateEnd", simulation(size=size))
    for version in (0, 99999):
        trial.call("ncclGroupStart")
        trial.call("ncclGroupSimulateEnd", simulation(version=version))
    trial.clean()


@rule("1.2", "an empty group has no estimate")
def simulate_nothing(trial: Trial) -> None:
    info = simulation()
    trial.call("ncclGroupStart")
    trial.call("ncclGroupSimulateEnd", info)
    trial.same("the estimate", estimate(info), -1.0)


@rule("1.2", "an inner SimulateEnd looks at nothing")
def simulate_inside(trial: Trial) -> None:
    trial.call("ncclGroupStart")
    trial.call("ncclGroupStart")
    trial.call("ncclGroupSimulateEnd", simulation(magic=1))
    trial.call("ncclGroupEnd")
    trial.clean()


@rule("1.2", "a poisoned group gives its error, not an estimate")
def simulate_poisoned(trial: Trial) -> None:
    for info in (simulation(), None, simulation(magic=1)):
        trial.call("ncclGroupStart")
        bad_operation(trial)
        trial.call("ncclGroupSimulateEnd", info, gives=ARGUMENT)
        trial.clean()


@rule(
    "1.2",
    "a simulated group launches nothing, and estimates its last collective",
    Needs.DEVICES,
)
def simulate_collective(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(1 << 16, b"\x07\0\0\0")
        before = data.read()
        estimates = []
        for count in (1, 1 << 14):
            info = simulation()
            rank.call("ncclGroupStart")
            rank.all_reduce(data, data, count, INT32)
            rank.call("ncclGroupSimulateEnd", info)
            estimates.append(estimate(info))
        rank.synchronize()
        rank.same("the data", data.read() == before, True)
        rank.same("both are positive and grow", 0 < estimates[0] <= estimates[1], True)
        data.free()

    with_ranks(trial, 2, body)


@rule("1.2", "a group of messages alone has no estimate", Needs.DEVICES)
def simulate_messages(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data, info = rank.memory(8), simulation()
        rank.call("ncclGroupStart")
        for name in ("ncclSend", "ncclRecv"):
            rank.call(name, data, 1, INT32, rank.rank, rank.comm, rank.stream)
        rank.call("ncclGroupSimulateEnd", info)
        rank.same("the estimate", estimate(info), -1.0)
        data.free()

    with_ranks(trial, 2, body)
