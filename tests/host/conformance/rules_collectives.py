"""Section 9: collectives."""

from __future__ import annotations

import struct

from conformance.rules import Needs, rule
from conformance.trial import (
    ARGUMENT,
    AVG,
    FLOAT8E4M3,
    INT8,
    INT32,
    MAX,
    NOT_READY,
    SUM,
    USAGE,
    Rank,
    Trial,
    with_ranks,
)  # fmt: skip

# Function, and its arguments between the count and the communicator.
CALLS: dict[str, tuple[str, ...]] = {
    "ncclAllReduce": ("type", "op"),
    "ncclReduce": ("type", "op", "root"),
    "ncclBroadcast": ("type", "root"),
    "ncclAllGather": ("type",),
    "ncclReduceScatter": ("type", "op"),
    "ncclAlltoAll": ("type",),
    "ncclGather": ("type", "root"),
    "ncclScatter": ("type", "root"),
}
GOOD = {"type": INT32, "op": SUM, "root": 0}


def issue(
    rank: Rank,
    name: str,
    send: object,
    recv: object,
    count: int,
    gives: int = 0,
    **special: int,
) -> None:
    middle = [{**GOOD, **special}[kind] for kind in CALLS[name]]
    rank.call(name, send, recv, count, *middle, rank.comm, rank.stream, gives=gives)


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def values_of(memory: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(memory) // 4}i", memory)


@rule(
    "9.1",
    "a root, type or operator that is none is an invalid argument, also with count 0",
    Needs.DEVICES,
)
def bad_arguments(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(64)
        for name, kinds in CALLS.items():
            for count in (1, 0):
                for kind, bad in (
                    ("root", -1),
                    ("root", 2),
                    ("type", 12),
                    ("type", -1),
                    ("op", -1),
                    ("op", 99),
                ):
                    if kind in kinds:
                        issue(rank, name, data, data, count, ARGUMENT, **{kind: bad})
        for name in ("ncclSend", "ncclRecv"):
            for peer, kind in ((2, INT32), (-1, INT32), (0, 12)):
                rank.call(name, data, 1, kind, peer, rank.comm, rank.stream, gives=ARGUMENT)
        rank.clean()
        data.free()

    with_ranks(trial, 2, body)


@rule("9.1", "in the default mode no pointer is looked at by the call", Needs.HOST)
def pointers_unchecked(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        rank.call("ncclGroupStart")
        issue(rank, "ncclAllReduce", None, None, 1)
        rank.all_reduce(None, None, 1, dtype=99, gives=ARGUMENT)  # so that nothing is launched
        rank.call("ncclGroupEnd", gives=ARGUMENT)

    with_ranks(trial, 2, body)


@rule(
    "9.1",
    "the strict mode names ranks whose operations differ; NCCL hangs or corrupts",
    Needs.HOST,
    runtime_connect="0",
)
def mismatch(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(64)
        rank.all_reduce(data, data, 1 + rank.rank)
        rank.same("the error", rank.wait_for_error(), USAGE)
        rank.abort()
        rank.synchronize()
        data.free()

    with_ranks(trial, 2, body)


@rule(
    "9.1",
    "the faithful mode hangs on a mismatch, until it is aborted",
    Needs.HOST,
    mode="faithful",
    runtime_connect="0",
)
def faithful(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(64)
        if rank.rank == 0:
            rank.all_reduce(data, data, 1)
            rank.same("the error", rank.wait_for_error(0.2), 0)
            rank.call("cuStreamQuery", rank.stream, gives=NOT_READY)
        rank.abort()
        rank.synchronize()
        data.free()

    with_ranks(trial, 2, body)


# What each rank gives in its first words, and what it then has, by function: (ranks, rank).
E = 3  # the count


def given(ranks: int, rank: int) -> list[int]:
    return [100 * rank + i for i in range(E * ranks)]


def expected(name: str, ranks: int, rank: int, root: int) -> list[int] | None:
    all_given = [given(ranks, r) for r in range(ranks)]
    sums = [sum(column) for column in zip(*all_given, strict=True)]
    block = slice(rank * E, rank * E + E)
    return {
        "ncclAllReduce": sums[:E],
        "ncclReduce": sums[:E] if rank == root else None,
        "ncclBroadcast": all_given[root][:E],
        "ncclAllGather": [v for one in all_given for v in one[:E]],
        "ncclReduceScatter": sums[block],
        "ncclAlltoAll": [v for one in all_given for v in one[block]],
        "ncclGather": [v for one in all_given for v in one[:E]] if rank == root else None,
        "ncclScatter": all_given[root][block],
    }[name]


for name in CALLS:

    def moves(trial: Trial, name: str = name) -> None:
        def body(rank: Rank) -> None:
            for root in range(rank.ranks):
                send = rank.memory(4 * E * rank.ranks, words(*given(rank.ranks, rank.rank)))
                recv = rank.memory(4 * E * rank.ranks, words(*[-1] * E * rank.ranks))
                issue(rank, name, send, recv, E, root=root)
                rank.synchronize()
                found = list(values_of(recv.read()))
                wanted = expected(name, rank.ranks, rank.rank, root) or []
                rank.same(f"what root {root} gives", found[: len(wanted)], wanted)
                rank.same("the rest", set(found[len(wanted) :]) <= {-1}, True)
                send.free()
                recv.free()

        with_ranks(trial, 3, body)

    rule("9.2", f"{name}: what is read and what is written", Needs.DEVICES)(moves)


def own_offset(name: str, rank: Rank, root: int) -> tuple[int, int]:
    """Where send and receive buffers begin in memory of all blocks when in place."""
    own = {
        "ncclAllGather": (rank.rank, 0),
        "ncclReduceScatter": (0, rank.rank),
        "ncclGather": (rank.rank, 0),
        "ncclScatter": (0, rank.rank),
    }.get(name, (0, 0))
    return own[0] * 4 * E, own[1] * 4 * E


for name in (n for n in CALLS if n != "ncclAlltoAll"):

    def in_place(trial: Trial, name: str = name) -> None:
        def body(rank: Rank) -> None:
            root = 1
            data = rank.memory(4 * E * rank.ranks, words(*given(rank.ranks, rank.rank)))
            send, recv = own_offset(name, rank, root)
            if name in ("ncclAllGather", "ncclGather"):
                data.write(words(*given(rank.ranks, rank.rank)[:E]), send)
            issue(rank, name, data.address + send, data.address + recv, E, root=root)
            rank.synchronize()
            wanted = expected(name, rank.ranks, rank.rank, root)
            if wanted:
                start = recv // 4
                found = list(values_of(data.read()))[start : start + len(wanted)]
                rank.same("the data", found, wanted)
            data.free()

        with_ranks(trial, 3, body)

    rule("9.2", f"{name} works in place", Needs.DEVICES)(in_place)


@rule("9.2", "Bcast is Broadcast in one buffer", Needs.DEVICES)
def bcast(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, words(rank.rank + 40))
        rank.call("ncclBcast", data, 1, INT32, 1, rank.comm, rank.stream)
        rank.synchronize()
        rank.same("the data", data.read(), words(41))
        data.free()

    with_ranks(trial, 2, body)


@rule("9.2", "the strict mode refuses overlaps that are not in place", Needs.HOST)
def overlaps(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(64)
        issue(rank, "ncclAllReduce", data.address, data.address + 4, 2, ARGUMENT)
        issue(rank, "ncclAlltoAll", data.address, data.address, 2, ARGUMENT)
        data.free()

    with_ranks(trial, 2, body)


@rule(
    "9.3",
    "a collective of no elements is dropped at the call, whatever the others do",
    Needs.DEVICES,
)
def no_elements(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 0:
            for name in CALLS:
                issue(rank, name, None, None, 0)
            rank.call("ncclGroupStart")
            issue(rank, "ncclAllReduce", None, None, 0)
            rank.call("ncclGroupEnd")
            rank.synchronize()

    with_ranks(trial, 2, body)


@rule(
    "9.4",
    "with one rank a collective is done at the call, even in a group that fails",
    Needs.DEVICES,
)
def one_rank(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        send, recv = rank.memory(4, words(7)), rank.memory(4)
        rank.call("ncclGroupStart")
        rank.all_reduce(send, recv, 1)
        rank.synchronize()
        rank.same("before the end of the group", recv.read(), words(7))
        rank.all_reduce(send, recv, 1, dtype=99, gives=ARGUMENT)
        rank.call("ncclGroupEnd", gives=ARGUMENT)
        send.free()
        recv.free()

    with_ranks(trial, 1, body)


@rule("9.4", "with one rank there is no average of 8-bit floats", Needs.DEVICES)
def one_rank_float8(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4)
        rank.all_reduce(data, data, 1, dtype=FLOAT8E4M3, op=AVG, gives=ARGUMENT)
        rank.all_reduce(data, data, 1, dtype=FLOAT8E4M3, op=MAX)
        rank.synchronize()
        data.free()

    with_ranks(trial, 1, body)


@rule("9.5", "there are twelve types, of 1 1 4 4 8 8 2 4 8 2 1 1 bytes", Needs.DEVICES)
def types(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        for dtype, size in enumerate((1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)):
            send, recv = rank.memory(64, b"\x01" * 64), rank.memory(64)
            rank.call("ncclBroadcast", send, recv, 3, dtype, 0, rank.comm, rank.stream)
            rank.synchronize()
            rank.same(f"bytes of type {dtype}", recv.read().count(1), 3 * size)
            send.free()
            recv.free()
        data = rank.memory(64)
        for dtype in (-1, 12, 99):
            rank.all_reduce(data, data, 1, dtype=dtype, gives=ARGUMENT)
        rank.all_reduce(data, data, 1, dtype=INT8)
        rank.synchronize()
        data.free()

    with_ranks(trial, 2, body)
