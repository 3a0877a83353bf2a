"""Section 15, and rule 14 of section 1: calls on streams that are being captured."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

from conformance.rules import Needs, rule
from conformance.rules_collectives import words
from conformance.rules_streams import second_stream
from conformance.trial import CUDA, INT32, SUM, USAGE, Rank, Trial, with_ranks

THREAD_LOCAL = 1


def captured(rank: Rank, body: Callable[[], object]) -> ctypes.c_void_p:
    """The graph of what the body puts on the rank's stream."""
    graph = rank.pointer()
    rank.call("cuStreamBeginCapture_v2", rank.stream, THREAD_LOCAL)
    body()
    rank.call("cuStreamEndCapture", rank.stream, ctypes.byref(graph))
    return graph


@contextlib.contextmanager
def executable(rank: Rank, graph: ctypes.c_void_p) -> Iterator[ctypes.c_void_p]:
    """What can be launched of a graph, which goes."""
    made = rank.pointer()
    rank.call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, 0)
    rank.call("cuGraphDestroy", graph)
    yield made
    rank.call("cuGraphExecDestroy", made)


@rule("15", "a captured call does nothing at the call, and all at each launch", Needs.DEVICES)
def replayed(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, words(rank.rank + 1))
        graph = captured(rank, lambda: rank.all_reduce(data, data, 1))
        rank.same("after the capture", data.read(), words(rank.rank + 1))
        with executable(rank, graph) as made:
            for sum_so_far in (3, 6, 12):
                rank.call("cuGraphLaunch", made, rank.stream)
                rank.same("after a launch", data.read(), words(sum_so_far))
        data.free()

    with_ranks(trial, 2, body)


@rule("15", "a launch reads the buffers as they are then", Needs.DEVICES)
def read_at_launch(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data, out = rank.memory(4, words(1)), rank.memory(4)
        graph = captured(rank, lambda: rank.all_reduce(data, out, 1))
        with executable(rank, graph) as made:
            for value in (5, 7):
                data.write(words(value))
                rank.call("cuGraphLaunch", made, rank.stream)
                rank.same("the sum", out.read(), words(2 * value))
        data.free()
        out.free()

    with_ranks(trial, 2, body)


@rule("15", "captured and eager calls may be mixed", Needs.DEVICES)
def mixed(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, words(1))
        graph = captured(rank, lambda: rank.all_reduce(data, data, 1))
        with executable(rank, graph) as made:
            rank.all_reduce(data, data, 1)
            rank.call("cuGraphLaunch", made, rank.stream)
            rank.all_reduce(data, data, 1)
            rank.same("three sums", data.read(), words(8))
        data.free()

    with_ranks(trial, 2, body)


@rule("15", "a group is captured as a whole", Needs.DEVICES)
def group(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data, other = rank.memory(4, words(rank.rank + 1)), rank.memory(4)
        peer = 1 - rank.rank

        def calls() -> None:
            rank.call("ncclGroupStart")
            rank.call("ncclSend", data, 1, INT32, peer, rank.comm, rank.stream)
            rank.call("ncclRecv", other, 1, INT32, peer, rank.comm, rank.stream)
            rank.call("ncclGroupEnd")

        graph = captured(rank, calls)
        rank.same("before the launch", other.read(), words(0))
        with executable(rank, graph) as made:
            rank.call("cuGraphLaunch", made, rank.stream)
            rank.same("what the peer has", other.read(), words(peer + 1))
        data.free()
        other.free()

    with_ranks(trial, 2, body)


@rule("15", "a stream whose capture is broken takes no call", Needs.DEVICES)
def broken(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data, graph = rank.memory(4, words(1)), rank.pointer()
        rank.all_reduce(data, data, 1)
        rank.synchronize()
        rank.call("cuStreamBeginCapture_v2", rank.stream, THREAD_LOCAL)
        rank.call("cuStreamQuery", rank.stream, gives=900)  # unsupported, and it is broken
        rank.all_reduce(data, data, 1, gives=CUDA)
        rank.call("cuStreamEndCapture", rank.stream, ctypes.byref(graph), gives=901)
        data.free()

    with_ranks(trial, 2, body)


@rule("1 rule 14", "one communicator's streams are all captured, or none is", Needs.DEVICES)
def both(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        plain, graph = second_stream(rank), rank.pointer()
        a, b = rank.memory(4, words(1)), rank.memory(4, words(1))
        rank.all_reduce(a, a, 1)
        rank.synchronize()
        rank.call("cuStreamBeginCapture_v2", rank.stream, THREAD_LOCAL)
        rank.call("ncclGroupStart")
        rank.all_reduce(a, a, 1)
        rank.call("ncclAllReduce", b, b, 1, INT32, SUM, rank.comm, plain)
        rank.call("ncclGroupEnd", gives=USAGE)
        rank.call("cuStreamEndCapture", rank.stream, ctypes.byref(graph))
        rank.call("cuGraphDestroy", graph)
        rank.call("cuStreamDestroy_v2", plain)
        a.free()
        b.free()

    with_ranks(trial, 2, body)
