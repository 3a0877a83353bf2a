"""Section 18: collectives with a config."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from structs import UNSET, coll_config

from conformance.rules import Needs, rule
from conformance.rules_collectives import CALLS, E, expected, given, issue, values_of, words
from conformance.rules_groups import OPERATIONS, fill
from conformance.trial import (
    ARGUMENT,
    INT32,
    NON_BLOCKING,
    NOT_READY,
    SUCCESS,
    SUM,
    USAGE,
    Rank,
    Trial,
    with_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


def asked(trial: Trial, configs: Iterable[tuple[Any, bool]]) -> None:
    """Give configs to an all-reduce on NULL in a group.

    One that is accepted lets the call see its NULL communicator, which poisons the group; one
    that is refused does not.
    """
    arguments = fill(trial, OPERATIONS["ncclAllReduceConfig"])[:-1]
    for made, accepted in configs:
        trial.call("ncclGroupStart")
        trial.call("ncclAllReduceConfig", *arguments, made, gives=ARGUMENT)
        trial.call("ncclGroupEnd", gives=ARGUMENT if accepted else SUCCESS)
    trial.clean()


@rule("18", "a struct needs its magic number and the size to reach it; more is clamped")
def struct(trial: Trial) -> None:
    sizes = ((0, False), (1, False), (8, False), (11, False))
    fine = (12, 15, 16, 63, 64, 71, 72, 73, 4096, 1 << 40)
    asked(trial, [(coll_config(size), ok) for size, ok in (*sizes, *((s, True) for s in fine))])
    asked(trial, [(coll_config(magic=1), False), (None, True)])


@rule("18", "any version is taken")
def versions(trial: Trial) -> None:
    known = (0, 21400, 23100, 23199, 23200, 23203, 30000, 2**32 - 1)
    asked(trial, [(coll_config(version=version), True) for version in known])


@rule("18", "forceAlgSelection is 0 or 1")
def force(trial: Trial) -> None:
    asked(
        trial, [(coll_config(force=value), value in (0, 1)) for value in (0, 1, 2, -1, UNSET)]
    )


@rule("18", "CTAPolicy is unset, or 0 to 3")
def policy(trial: Trial) -> None:
    asked(
        trial,
        [
            (coll_config(policy=v), v in (UNSET, 0, 1, 2, 3))
            for v in (UNSET, 0, 1, 2, 3, 4, 7, 9, -1)
        ],
    )


@rule("18", "bounds on CTAs and clusters are hints: none is refused")
def bounds(trial: Trial) -> None:
    configs = []
    for place in range(4):
        for value in (0, -1, 1, 64, 1000, 2**31 - 1):
            each = [UNSET] * 4
            each[place] = value
            configs.append((coll_config(bounds=(each[0], each[1], each[2], each[3])), True))
    configs.append((coll_config(bounds=(5, 2, UNSET, UNSET)), True))
    asked(trial, configs)


@rule("18", "a selection is not read before the communicator is known")
def selection_late(trial: Trial) -> None:
    asked(
        trial,
        [
            (coll_config(selection=text), True)
            for text in (b"", b"RING", b"bogus", b"^", b",", b"x" * 5000)
        ],
    )


for name in CALLS:

    def checks(trial: Trial, name: str = name) -> None:
        arguments = fill(trial, OPERATIONS[f"{name}Config"])[:-1]
        for made, end in ((coll_config(magic=1), SUCCESS), (coll_config(), ARGUMENT)):
            trial.call("ncclGroupStart")
            trial.call(f"{name}Config", *arguments, made, gives=ARGUMENT)
            trial.call("ncclGroupEnd", gives=end)

    rule("18", f"{name}Config looks at its config first")(checks)


for name in CALLS:

    def does_the_same(trial: Trial, name: str = name) -> None:
        def body(rank: Rank) -> None:
            size = 4 * E * rank.ranks
            send = rank.memory(size, words(*given(rank.ranks, rank.rank)))
            recv = rank.memory(size)
            values = {"type": INT32, "op": SUM, "root": 1}
            middle = [values[kind] for kind in CALLS[name]]
            for made in (None, coll_config()):
                rank.call(f"{name}Config", send, recv, E, *middle, rank.comm, rank.stream, made)
                rank.synchronize()
                wanted = expected(name, rank.ranks, rank.rank, 1) or []
                rank.same("the result", list(values_of(recv.read()))[: len(wanted)], wanted)
            send.free()
            recv.free()

        with_ranks(trial, 2, body)

    rule("18", f"{name}Config does what {name} does", Needs.DEVICES)(does_the_same)


def configured(rank: Rank, data: Any, made: Any, count: int = 1, gives: int = SUCCESS) -> None:
    rank.call(
        "ncclAllReduceConfig",
        data,
        data,
        count,
        INT32,
        SUM,
        rank.comm,
        rank.stream,
        made,
        gives=gives,
    )


@rule(
    "18",
    "selections: comma is or, plus is and, caret is not; a tag is the start of a name",
    Needs.DEVICES,
)
def selections(trial: Trial) -> None:
    good = (
        b"", b" ", b"RING", b"ri ng", b"tree,ring", b"ring+^RING_LL128", b"^tree", b"ring,",
        b"symk,ring",
    )  # fmt: skip
    bad = (b"bogus", b"^", b",", b"+", b"ring+tree", b"ring,bogus", b"^^ring", b"_LL")

    def body(rank: Rank) -> None:
        data = rank.memory(4)
        for text in good:
            configured(rank, data, coll_config(selection=text))
        for text in bad:
            configured(rank, data, coll_config(selection=text), gives=ARGUMENT)
            configured(rank, data, coll_config(selection=text, force=0))
            configured(rank, data, coll_config(selection=text), count=0)  # dropped before
        rank.synchronize()
        data.free()

    with_ranks(trial, 2, body)


@rule("18", "what is made of messages has no algorithm to select", Needs.DEVICES)
def no_algorithms(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        a, b = rank.memory(16), rank.memory(16)
        tail = (rank.comm, rank.stream)
        for forced, code in ((1, ARGUMENT), (0, SUCCESS)):
            made = coll_config(selection=b"ring", force=forced)
            rank.call("ncclAlltoAllConfig", a, b, 1, INT32, *tail, made, gives=code)
            for name in ("ncclGatherConfig", "ncclScatterConfig"):
                rank.call(name, a, b, 1, INT32, 0, *tail, made, gives=code)
        rank.synchronize()
        a.free()
        b.free()

    with_ranks(trial, 2, body)


@rule(
    "18",
    "a known algorithm that is not there is found out only at the end of the group",
    Needs.HOST,
)
def unavailable(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, words(1))
        rank.call("ncclGroupStart")
        configured(rank, data, coll_config(selection=b"NVLS,COLLNET"))
        rank.call("ncclGroupEnd", gives=ARGUMENT)
        configured(rank, data, coll_config(selection=b"NVLS"), gives=ARGUMENT)
        rank.same("the data", data.read(), words(1))
        configured(rank, data, coll_config(selection=b"NVLS", force=0))
        rank.synchronize()
        rank.same("the sum", data.read(), words(2))
        data.free()

    with_ranks(trial, 2, body)


class Held:
    """A stream that waits for a word of device memory, until it is released."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.word, self.other = rank, rank.memory(4), rank.pointer()
        rank.call("cuStreamCreateWithPriority", ctypes.byref(self.other), NON_BLOCKING, 0)
        rank.call("cuStreamWaitValue32_v2", rank.stream, self.word.address, 1, 0)

    def release(self) -> None:
        self.rank.call("cuStreamWriteValue32_v2", self.other, self.word.address, 1, 0)
        self.rank.synchronize()
        self.rank.call("cuStreamDestroy_v2", self.other)
        self.word.free()


@rule("18", "the launch completion event is recorded; one a communicator and group", Needs.HOST)
def events(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data, event = rank.memory(4), rank.pointer()
        configured(rank, data, None)  # first contact, where there is one
        rank.call("cuEventCreate", ctypes.byref(event), 2)
        made = coll_config(event=event.value or 0)
        held = Held(rank)
        configured(rank, data, made)
        rank.call("cuEventQuery", event, gives=NOT_READY)
        held.release()
        rank.call("cuEventQuery", event)
        rank.call("ncclGroupStart")
        configured(rank, data, made)
        configured(rank, data, made)
        rank.call("ncclGroupEnd", gives=USAGE if rank.ranks > 1 else SUCCESS)
        rank.synchronize()
        rank.call("cuEventDestroy_v2", event)
        data.free()

    for ranks in (1, 2):
        with_ranks(trial, ranks, body)


@rule(
    "18",
    "a collective with a config and one without are the same to the other ranks",
    Needs.DEVICES,
)
def mixed(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, words(4))
        if rank.rank == 0:
            configured(rank, data, coll_config())
        else:
            issue(rank, "ncclAllReduce", data, data, 1)
        rank.synchronize()
        rank.same("the sum", data.read(), words(8))
        data.free()

    with_ranks(trial, 2, body)
