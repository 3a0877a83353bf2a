"""Section 17: put, signal, and waiting for signals."""

from __future__ import annotations

import threading
import time
from typing import Any

from nccl_ranks import config
from structs import descriptors

from conformance.rules import Needs, rule
from conformance.rules_memory import PAGE, registered
from conformance.trial import ARGUMENT, NOT_READY, UINT8, USAGE, Rank, Trial, with_ranks


class Windowed:
    """A rank with a window over two pages of its own."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.memory = rank.memory(2 * PAGE, registered=True)
        self.window = registered(rank, self.memory, 2 * PAGE)

    def put(
        self,
        peer: int,
        nbytes: int = 4,
        offset: int = PAGE,
        source: Any = "own",
        gives: int = 0,
        **special: Any,
    ) -> None:
        use = {
            "type": UINT8,
            "index": 0,
            "context": 0,
            "flags": 0,
            "window": self.window,
            **special,
        }
        self.rank.call(
            "ncclPutSignal",
            self.memory if source == "own" else source,
            nbytes,
            use["type"],
            peer,
            use["window"],
            offset,
            use["index"],
            use["context"],
            use["flags"],
            self.rank.comm,
            self.rank.stream,
            gives=gives,
        )

    def close(self) -> None:
        self.rank.call("ncclCommWindowDeregister", self.rank.comm, self.window)
        self.memory.free()


def signal(
    rank: Rank, peer: int, index: int = 0, context: int = 0, gives: int = 0, flags: int = 0
) -> None:
    rank.call("ncclSignal", peer, index, context, flags, rank.comm, rank.stream, gives=gives)


def wait(rank: Rank, *each: tuple[int, int, int, int], gives: int = 0) -> None:
    rank.call(
        "ncclWaitSignal", len(each), descriptors(*each), rank.comm, rank.stream, gives=gives
    )


@rule("17", "a signal follows the data of its put; offsets are in bytes", Needs.HOST)
def put(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        own = Windowed(rank)
        own.memory.write(bytes([rank.rank + 1] * 4))
        own.put(1 - rank.rank, offset=PAGE + 3)
        wait(rank, (1, 1 - rank.rank, 0, 0))
        rank.synchronize()
        rank.same(
            "the data",
            own.memory.read()[PAGE + 2 : PAGE + 8],
            bytes([0, *[2 - rank.rank] * 4, 0]),
        )
        own.close()

    with_ranks(trial, 2, body)


@rule("17", "a put of nothing still gives its signal", Needs.HOST)
def empty_put(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        own = Windowed(rank)
        own.put(1 - rank.rank, 0)
        wait(rank, (1, 1 - rank.rank, 0, 0))
        rank.synchronize()
        own.close()

    with_ranks(trial, 2, body)


@rule(
    "17", "signals are counted, earlier ones too; a wait consumes what it waits for", Needs.HOST
)
def counted(trial: Trial) -> None:
    asked = threading.Event()

    def body(rank: Rank) -> None:
        own = Windowed(rank)
        if rank.rank == 0:
            for _ in range(3):
                signal(rank, 1)
            rank.synchronize()
            asked.wait(5)
            signal(rank, 1)
        else:
            wait(rank, (2, 0, 0, 0))
            rank.synchronize()
            wait(rank, (2, 0, 0, 0))
            time.sleep(0.02)
            rank.call("cuStreamQuery", rank.stream, gives=NOT_READY)
            asked.set()
        rank.synchronize()
        own.close()

    with_ranks(trial, 2, body)


@rule("17", "a wait blocks its stream, not the host", Needs.HOST)
def wait_returns(trial: Trial) -> None:
    returned = threading.Event()

    def body(rank: Rank) -> None:
        own = Windowed(rank)
        if rank.rank == 0:
            wait(rank, (1, 1, 0, 0))
            rank.call("cuStreamQuery", rank.stream, gives=NOT_READY)
            returned.set()
        else:
            rank.same("the call returns without the signal", returned.wait(5), True)
            signal(rank, 0)
        rank.synchronize()
        own.close()

    with_ranks(trial, 2, body)


@rule("17", "contexts and indices are counted apart, and have bounds", Needs.HOST)
def indices(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        own = Windowed(rank)
        peer = 1 - rank.rank
        for bad in ((2, 0), (-1, 0), (0, 2), (0, -1)):
            signal(rank, peer, *bad, gives=ARGUMENT)
            own.put(peer, index=bad[0], context=bad[1], gives=ARGUMENT)
            wait(rank, (1, peer, *bad), gives=ARGUMENT)
        signal(rank, peer, 1, 0)
        signal(rank, peer, 0, 1)
        wait(rank, (1, peer, 1, 0), (1, peer, 0, 1))
        rank.synchronize()
        own.close()

    with_ranks(trial, 2, body, config(numRmaCtx=2, numRmaSig=2))


@rule("17", "a put needs a peer's window, and a source in a symmetric one", Needs.HOST)
def put_arguments(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        own = Windowed(rank)
        plain = rank.memory(PAGE, registered=True)
        window = registered(rank, plain, flags=0)
        own.put(0, gives=ARGUMENT, window=None)
        own.put(0, source=None, gives=ARGUMENT)
        own.put(0, source=plain, gives=ARGUMENT)
        own.put(0, source=rank.bytes(8), gives=ARGUMENT)
        own.put(0, gives=ARGUMENT, flags=1)
        own.put(0, gives=ARGUMENT, type=12)
        own.put(2, gives=ARGUMENT)
        own.put(-1, gives=ARGUMENT)
        rank.clean()
        rank.call("ncclCommWindowDeregister", rank.comm, window)
        plain.free()
        own.close()

    with_ranks(trial, 2, body)


@rule("17", "a wait needs descriptors, each for at least one signal", Needs.HOST)
def wait_arguments(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        own = Windowed(rank)
        rank.call("ncclWaitSignal", 1, None, rank.comm, rank.stream, gives=ARGUMENT)
        rank.call(
            "ncclWaitSignal",
            0,
            descriptors((1, 0, 0, 0)),
            rank.comm,
            rank.stream,
            gives=ARGUMENT,
        )
        wait(rank, (0, 0, 0, 0), gives=ARGUMENT)
        wait(rank, (-1, 0, 0, 0), gives=ARGUMENT)
        signal(rank, 0, gives=ARGUMENT, flags=1)
        own.close()

    with_ranks(trial, 1, body)


@rule(
    "17",
    "signals before the first window are invalid usage; rmaEagerInit makes them possible",
    Needs.HOST,
)
def before_windows(trial: Trial) -> None:
    def refused(rank: Rank) -> None:
        signal(rank, 0, gives=USAGE)
        wait(rank, (1, 0, 0, 0), gives=USAGE)

    def eager(rank: Rank) -> None:
        signal(rank, 1 - rank.rank)
        wait(rank, (1, 1 - rank.rank, 0, 0))
        rank.synchronize()

    with_ranks(trial, 2, refused)
    with_ranks(trial, 2, eager, config(rmaEagerInit=1))


@rule("17", "numRmaCtx=0 means no one-sided operations", Needs.HOST)
def none_at_all(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        own = Windowed(rank)
        own.put(0, gives=ARGUMENT)
        signal(rank, 0, gives=ARGUMENT)
        own.close()

    with_ranks(trial, 1, body, config(numRmaCtx=0))
