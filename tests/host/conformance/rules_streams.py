"""Section 14: streams and ordering."""

from __future__ import annotations

import ctypes
import threading

from conformance.rules import Needs, rule
from conformance.rules_collectives import words
from conformance.trial import CUDA, INT32, NON_BLOCKING, NOT_READY, SUM, Rank, Trial, with_ranks


def second_stream(rank: Rank) -> ctypes.c_void_p:
    stream = rank.pointer()
    rank.call("cuStreamCreateWithPriority", ctypes.byref(stream), NON_BLOCKING, 0)
    return stream


@rule("14", "all streams of a group form one barrier", Needs.DEVICES)
def barrier(trial: Trial) -> None:
    asked = threading.Event()

    def body(rank: Rank) -> None:
        other = second_stream(rank)
        a, b = rank.memory(4, words(1)), rank.memory(4, words(2))
        rank.all_reduce(a, a, 1)
        rank.synchronize()
        if rank.rank == 1:
            asked.wait(5)
        rank.call("ncclGroupStart")
        rank.all_reduce(a, a, 1)
        rank.call("ncclAllReduce", b, b, 1, INT32, SUM, rank.comm, other)
        rank.call("ncclGroupEnd")
        if rank.rank == 0:
            for stream in (rank.stream, other):
                rank.call("cuStreamQuery", stream, gives=NOT_READY)
            asked.set()
        rank.call("cuStreamSynchronize", other)
        rank.synchronize()
        rank.same("both", a.read() + b.read(), words(4, 4))
        rank.call("cuStreamDestroy_v2", other)
        a.free()
        b.free()

    with_ranks(trial, 2, body)


@rule(
    "14", "operations of one communicator keep their order on whatever streams", Needs.DEVICES
)
def order(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        other = second_stream(rank)
        data = rank.memory(4, words(1))
        for stream in (rank.stream, other, rank.stream, other):
            rank.call("ncclAllReduce", data, data, 1, INT32, SUM, rank.comm, stream)
        rank.call("cuStreamSynchronize", other)
        rank.same("the sum", data.read(), words(16))
        rank.call("cuStreamDestroy_v2", other)
        data.free()

    with_ranks(trial, 2, body)


@rule("14", "NULL is the legacy stream of the current device", Needs.DEVICES)
def legacy(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        data = rank.memory(4, words(3))
        rank.call("ncclAllReduce", data, data, 1, INT32, SUM, rank.comm, None)
        rank.call("cuStreamSynchronize", None)
        rank.same("the sum", data.read(), words(6))
        data.free()

    with_ranks(trial, 2, body)


@rule("14", "a stream of another device is refused", Needs.HOST)
def foreign_stream(trial: Trial) -> None:
    def body(rank: Rank) -> None:
        other, context, own = rank.pointer(), rank.pointer(), rank.pointer()
        rank.call("cuCtxGetCurrent", ctypes.byref(own))
        rank.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 5)
        rank.call("cuCtxSetCurrent", context)
        rank.call("cuStreamCreateWithPriority", ctypes.byref(other), NON_BLOCKING, 0)
        rank.call("cuCtxSetCurrent", own)
        data = rank.memory(4)
        rank.call("ncclGroupStart")
        rank.call("ncclAllReduce", data, data, 1, INT32, SUM, rank.comm, other)
        rank.call("ncclGroupEnd", gives=CUDA)
        rank.call("cuStreamDestroy_v2", other)
        rank.call("cuDevicePrimaryCtxRelease_v2", 5)
        data.free()

    with_ranks(trial, 2, body)
