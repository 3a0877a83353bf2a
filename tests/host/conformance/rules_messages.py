"""Sections 12 and 13: point to point, and first contact."""

from __future__ import annotations

import threading
import time

from conformance.rules import Needs, rule
from conformance.rules_collectives import words
from conformance.trial import INT32, NOT_READY, UINT8, USAGE, Rank, Trial, with_ranks


def message(
    rank: Rank,
    name: str,
    data: object,
    count: int,
    peer: int,
    dtype: int = INT32,
    gives: int = 0,
) -> None:
    rank.call(name, data, count, dtype, peer, rank.comm, rank.stream, gives=gives)


@rule(
    "12",
    "messages of a pair match in order, and types may differ where bytes are the same",
    Needs.DEVICES,
)
def pairs(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(16, words(1, 2, 3, 4))
        if rank.rank == 0:
            message(rank, "ncclSend", data.address + 4, 1, 1)
            message(rank, "ncclSend", data.address + 8, 2, 1)
        else:
            message(rank, "ncclRecv", data.address, 4, 0, UINT8)
            message(rank, "ncclRecv", data.address + 4, 2, 0)
        rank.synchronize()
        rank.same(
            "the data", data.read(), words(*((1, 2, 3, 4) if rank.rank == 0 else (2, 3, 4, 4)))
        )
        data.free()

    with_ranks(trial, 2, body)


@rule("12", "in a group, a ring of messages moves", Needs.DEVICES)
def ring(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(8, words(rank.rank, -1))
        rank.call("ncclGroupStart")
        message(rank, "ncclSend", data, 1, (rank.rank + 1) % rank.ranks)
        message(rank, "ncclRecv", data.address + 4, 1, (rank.rank - 1) % rank.ranks)
        rank.call("ncclGroupEnd")
        rank.synchronize()
        rank.same("what came", data.read()[4:], words((rank.rank - 1) % rank.ranks))
        data.free()

    with_ranks(trial, 3, body)


@rule(
    "12",
    "outside a group a send blocks its stream until the receive runs",
    Needs.HOST,
    runtime_connect="0",
)
def sends_block(trial: Trial) -> None:
    received = threading.Event()

    def body(rank: Rank) -> None:
        data = rank.memory(4)
        if rank.rank == 0:
            message(rank, "ncclSend", data, 1, 1)
            time.sleep(0.05)
            rank.call("cuStreamQuery", rank.stream, gives=NOT_READY)
            received.set()
        else:
            received.wait(5)
            message(rank, "ncclRecv", data, 1, 0)
        rank.synchronize()
        data.free()

    with_ranks(trial, 2, body)


@rule(
    "12",
    "a message to oneself without its other half is invalid usage at the end",
    Needs.DEVICES,
)
def half_a_message(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(8, words(5, 6))
        rank.call("ncclGroupStart")
        message(rank, "ncclSend", data, 1, rank.rank)
        rank.call("ncclGroupEnd", gives=USAGE)
        message(rank, "ncclSend", data, 1, rank.rank, gives=USAGE)
        rank.call("ncclGroupStart")
        message(rank, "ncclRecv", data.address + 4, 1, rank.rank)
        message(rank, "ncclSend", data, 1, rank.rank)
        rank.call("ncclGroupEnd")
        rank.synchronize()
        rank.same("what came", data.read(), words(5, 5))
        data.free()

    with_ranks(trial, 1, body)


@rule(
    "12",
    "a message of no elements is a message, and waits for its other half",
    Needs.HOST,
    runtime_connect="0",
)
def empty_messages(trial: Trial) -> None:
    asked = threading.Event()

    def body(rank: Rank) -> None:
        if rank.rank == 0:
            message(rank, "ncclSend", None, 0, 1)
            time.sleep(0.05)
            rank.call("cuStreamQuery", rank.stream, gives=NOT_READY)
            asked.set()
        else:
            asked.wait(5)
            message(rank, "ncclRecv", None, 0, 0)
        rank.synchronize()

    with_ranks(trial, 2, body)


@rule(
    "12", "the strict mode names messages whose bytes differ", Needs.HOST, runtime_connect="0"
)
def message_mismatch(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(16)
        message(
            rank,
            "ncclSend" if rank.rank == 0 else "ncclRecv",
            data,
            1 + rank.rank,
            1 - rank.rank,
        )
        rank.same("the error", rank.wait_for_error(), USAGE)
        rank.abort()
        rank.synchronize()
        data.free()

    with_ranks(trial, 2, body)


def asked_for_contact(trial: Trial, *patience_s: float) -> list[bool]:
    """Say of each of some calls of one function whether rank 0 waited in it for rank 1."""
    returned = [threading.Event() for _ in patience_s]
    waited: list[bool] = []

    def body(rank: Rank) -> None:
        for event, limit_s in zip(returned, patience_s, strict=True):
            if rank.rank == 1:
                waited.append(not event.wait(limit_s))
            data = rank.memory(4)
            rank.all_reduce(data, data, 1)
            event.set()
            rank.synchronize()
            data.free()

    with_ranks(trial, 2, body)
    return waited


@rule(
    "13",
    "gpulike: the first use of a function waits on the host for the peers",
    Needs.HOST,
    temper="gpulike",
)
def first_use(trial: Trial) -> None:
    found = asked_for_contact(trial, 0.2, 5)
    trial.same("the first waits, the second does not", found, [True, False])


@rule(
    "13",
    "NCCL_RUNTIME_CONNECT=0 leaves no first contact to make",
    Needs.HOST,
    temper="gpulike",
    runtime_connect="0",
)
def connected(trial: Trial) -> None:
    trial.same("the first waits", asked_for_contact(trial, 5), [False])
