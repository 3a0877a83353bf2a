"""Groups, point to point, streams, and splitting."""

from __future__ import annotations

import contextlib
import ctypes
import time

import nccl_ranks
import numpy as np
import pytest
from nccl_ranks import ARGUMENT, USAGE, Rank, last_error

FLOAT32, INT32, SUM = 7, 2, 0


def swap(rank: Rank, group: bool) -> None:
    """Send to the next rank and receive from the one before."""
    n = 5
    after, before = (rank.rank + 1) % rank.ranks, (rank.rank - 1) % rank.ranks
    mine = np.full(n, rank.rank, dtype=np.int32)
    theirs = np.full(n, -1, dtype=np.int32)
    if group:
        rank.must("ncclGroupStart")
    rank.must("ncclSend", mine.ctypes.data, n, INT32, after, rank.comm, rank.stream)
    rank.must("ncclRecv", theirs.ctypes.data, n, INT32, before, rank.comm, rank.stream)
    if group:
        rank.must("ncclGroupEnd")
        rank.synchronize()
        assert (theirs == before).all()
        rank.finish()
        return
    assert rank.pending(0.3)
    assert (theirs == -1).all()
    rank.must("ncclCommAbort", rank.comm)
    rank.synchronize()  # an aborted kernel ends as if it had succeeded
    assert rank.engine.cuStreamDestroy_v2(rank.stream) == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_of_messages_in_a_group(engine, temper, ranks):
    nccl_ranks.run_threads(engine, ranks, swap, True)


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_a_ring_of_messages_outside_a_group_hangs(engine, temper, mode):
    engine.set("mode", mode)
    # Making contact would hang too, in the call; this is about the streams.
    engine.set("runtime_connect", "0")
    try:
        nccl_ranks.run_threads(engine, 3, swap, False)
    finally:
        engine.set("mode", "strict")
        engine.set("runtime_connect", "1")


def exchange(rank: Rank) -> None:
    """Messages of all sizes with everybody at once, two for each pair, one of them empty."""
    sizes = (0, 1, 33, 65_536, 300_001)
    for round_, size in enumerate(sizes):
        shape = (rank.ranks, size)
        out = [np.full(shape, rank.rank * 100 + k + round_, dtype=np.int32) for k in range(2)]
        into = [np.full(shape, -1, dtype=np.int32) for _ in range(2)]
        rank.must("ncclGroupStart")
        for k in range(2):
            count = size if k == 0 else size // 2
            for peer in range(rank.ranks):
                arguments = (count, INT32, peer, rank.comm, rank.stream)
                rank.must("ncclSend", out[k][peer:].ctypes.data, *arguments)
                rank.must("ncclRecv", into[k][peer:].ctypes.data, *arguments)
        rank.must("ncclGroupEnd")
        rank.synchronize()
        for k in range(2):
            count = size if k == 0 else size // 2
            for peer in range(rank.ranks):
                assert (into[k][peer, :count] == peer * 100 + k + round_).all()
                assert (into[k][peer, count:] == -1).all()
    rank.finish()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_messages_between_all(engine, temper, ranks):
    nccl_ranks.run_threads(engine, ranks, exchange)


def test_messages_between_processes(engine, temper):
    environment = {"PYNCCL_HOST_TEMPER": temper}
    nccl_ranks.run_processes(engine, 2, exchange, environment=environment)


def one_way(rank: Rank) -> float:
    """A send is not done before its receive runs, however small it is."""
    x = np.full(1, 3.5, dtype=np.float32)
    if rank.rank == 0:
        rank.must("ncclSend", x.ctypes.data, 1, FLOAT32, 1, rank.comm, rank.stream)
        waited = rank.pending(0.2)
    else:
        time.sleep(0.3)
        x[:] = 0
        rank.must("ncclRecv", x.ctypes.data, 1, FLOAT32, 0, rank.comm, rank.stream)
        waited = True
    rank.synchronize()
    assert x[0] == 3.5
    rank.finish()
    return waited


def test_a_send_waits_for_its_receive(engine, temper):
    engine.set("runtime_connect", "0")
    try:
        assert nccl_ranks.run_threads(engine, 2, one_way) == [True, True]
    finally:
        engine.set("runtime_connect", "1")


def to_itself(rank: Rank) -> None:
    engine, x = rank.engine, np.arange(4, dtype=np.float32)
    y = np.zeros_like(x)
    arguments = (4, FLOAT32, rank.rank, rank.comm, rank.stream)
    assert engine.ncclSend(x.ctypes.data, *arguments) == USAGE
    rank.must("ncclGroupStart")
    rank.must("ncclSend", x.ctypes.data, *arguments)
    assert engine.ncclGroupEnd() == USAGE
    assert "to itself" in last_error(engine)
    rank.must("ncclGroupStart")
    rank.must("ncclRecv", y.ctypes.data, *arguments)
    rank.must("ncclSend", x.ctypes.data, *arguments)
    rank.must("ncclGroupEnd")
    rank.synchronize()
    assert (y == x).all()
    rank.finish()


def test_messages_to_oneself_come_in_pairs(engine, temper):
    nccl_ranks.run_threads(engine, 1, to_itself)
    nccl_ranks.run_threads(engine, 2, to_itself)


def sticky(rank: Rank) -> None:
    """A bad call makes the whole group fail, and nothing of it runs; the next one is clean."""
    engine, x = rank.engine, np.ones(4, dtype=np.float32)
    rank.must("ncclGroupStart")
    assert rank.all_reduce(x) == 0
    code = engine.ncclBroadcast(x.ctypes.data, x.ctypes.data, 4, FLOAT32, 9, rank.comm, None)
    assert code == ARGUMENT
    assert engine.ncclGroupEnd() == ARGUMENT
    assert engine.ncclGroupEnd() == USAGE
    assert not rank.pending(0.05)
    assert (x == 1).all()
    assert rank.async_error() == 0
    assert rank.all_reduce(x) == 0
    rank.synchronize()
    assert (x == rank.ranks).all()
    rank.finish()


def test_a_bad_call_spoils_its_group(engine, temper):
    nccl_ranks.run_threads(engine, 2, sticky)


CHECKS = {
    "root": ("ncclBroadcast", lambda x: (x, x, 4, FLOAT32, 2), "root 2"),
    "negative root": ("ncclBroadcast", lambda x: (x, x, 4, FLOAT32, -1), "root -1"),
    "peer": ("ncclSend", lambda x: (x, 4, FLOAT32, 7), "peer 7"),
    "data type": ("ncclAllGather", lambda x: (x, x, 4, 12), "no data type"),
    "operator": ("ncclAllReduce", lambda x: (x, x, 4, FLOAT32, 5), "unknown"),
    "negative operator": ("ncclAllReduce", lambda x: (x, x, 4, FLOAT32, -2), "no reduction"),
    "root before count": ("ncclReduce", lambda x: (x, x, 0, FLOAT32, SUM, 5), "root 5"),
    "type before count": ("ncclAllReduce", lambda x: (x, x, 0, 99, SUM), "no data type"),
    "overlap": ("ncclAllReduce", lambda x: (x, x + 4, 4, FLOAT32, SUM), "overlap"),
    "in place": ("ncclAlltoAll", lambda x: (x, x, 2, FLOAT32), "overlap"),
}


def checks(rank: Rank) -> None:
    x = np.zeros(16, dtype=np.float32)
    for name, (function, arguments, text) in CHECKS.items():
        code = getattr(rank.engine, function)(*arguments(x.ctypes.data), rank.comm, rank.stream)
        assert code == ARGUMENT, name
        assert text in last_error(rank.engine), (name, last_error(rank.engine))
    rank.must("ncclAllReduce", None, None, 0, FLOAT32, SUM, rank.comm, rank.stream)
    rank.finish()


def test_argument_checks(engine, temper):
    nccl_ranks.run_processes(engine, 2, checks, environment={"PYNCCL_HOST_TEMPER": temper})


def many_in_a_group(rank: Rank) -> None:
    """Operations of several kinds and streams in one group: the streams form one barrier."""
    engine = rank.engine
    streams = [engine.stream() for _ in range(3)]
    arrays = [np.full(100 * (k + 1), rank.rank + k, dtype=np.float32) for k in range(3)]
    gathered = np.zeros(rank.ranks, dtype=np.float32)
    rank.must("ncclGroupStart")
    for x, stream in zip(arrays, streams, strict=True):
        rank.must(
            "ncclAllReduce",
            x.ctypes.data,
            x.ctypes.data,
            x.size,
            FLOAT32,
            SUM,
            rank.comm,
            stream,
        )
    mine = np.array([rank.rank], dtype=np.float32)
    rank.must(
        "ncclAllGather",
        mine.ctypes.data,
        gathered.ctypes.data,
        1,
        FLOAT32,
        rank.comm,
        streams[0],
    )
    rank.must("ncclGroupEnd")
    engine.must("cuStreamSynchronize", streams[1])  # any of them has all of it behind it
    for k, x in enumerate(arrays):
        assert (x == sum(r + k for r in range(rank.ranks))).all()
    assert (gathered == np.arange(rank.ranks)).all()
    for stream in streams:
        engine.must("cuStreamDestroy_v2", stream)
    rank.finish()


@pytest.mark.parametrize("ranks", [2, 3])
def test_streams_of_a_group_form_one_barrier(engine, temper, ranks):
    nccl_ranks.run_threads(engine, ranks, many_in_a_group)


def large_first(rank: Rank) -> None:
    """Two operations of a group write the same place, and the smaller one is the last."""
    small, large = np.full(1, 2, dtype=np.float32), np.full(100, 5, dtype=np.float32)
    out = np.zeros(100, dtype=np.float32)
    rank.must("ncclGroupStart")
    assert rank.all_reduce(small, out, count=1) == 0
    assert rank.all_reduce(large, out) == 0
    rank.must("ncclGroupEnd")
    rank.synchronize()
    assert out[0] == 2 * rank.ranks
    assert (out[1:] == 5 * rank.ranks).all()
    rank.finish()


def test_a_group_is_not_in_the_order_of_its_calls(engine, temper):
    nccl_ranks.run_threads(engine, 2, large_first)


def serial(rank: Rank) -> None:
    """Operations of one communicator follow one another, whatever streams they are on."""
    other = rank.engine.stream()
    x = np.full(1, rank.rank + 1, dtype=np.float32)
    for k in range(20):
        stream = rank.stream if k % 2 else other
        rank.must(
            "ncclAllReduce", x.ctypes.data, x.ctypes.data, 1, FLOAT32, SUM, rank.comm, stream
        )
    rank.engine.must("cuStreamSynchronize", other)
    rank.synchronize()
    assert x[0] == sum(range(1, rank.ranks + 1)) * rank.ranks**19
    rank.engine.must("cuStreamDestroy_v2", other)
    rank.finish()


def test_operations_of_a_communicator_are_serial(engine, temper):
    nccl_ranks.run_threads(engine, 2, serial)


def test_one_thread_drives_all_ranks_in_groups(engine, temper):
    ranks = 3
    comms = (ctypes.c_void_p * ranks)()
    with contextlib.ExitStack() as stack:
        streams = []
        for device in range(ranks):
            stack.enter_context(nccl_ranks.on_device(engine, device))
            streams.append(engine.stream())
        nccl_ranks.must(engine, "ncclCommInitAll", comms, ranks, None)
        arrays = [np.full(7, device + 1, dtype=np.float32) for device in range(ranks)]
        for _ in range(2):
            nccl_ranks.must(engine, "ncclGroupStart")
            for comm, stream, x in zip(comms, streams, arrays, strict=True):
                address = x.ctypes.data
                code = engine.ncclAllReduce(address, address, 7, FLOAT32, SUM, comm, stream)
                assert code == 0
            nccl_ranks.must(engine, "ncclGroupEnd")
        for stream, x in zip(streams, arrays, strict=True):
            engine.must("cuStreamSynchronize", stream)
            assert (x == 18).all()
            engine.must("cuStreamDestroy_v2", stream)
        for comm in comms:  # the last call finalizes for all, so that one thread may make them
            nccl_ranks.must(engine, "ncclCommDestroy", comm)


def test_init_all_refuses_a_device_twice(engine, temper):
    comms = (ctypes.c_void_p * 2)()
    assert engine.ncclCommInitAll(comms, 2, (ctypes.c_int * 2)(1, 1)) == USAGE
    assert engine.ncclCommInitAll(comms, 2, (ctypes.c_int * 2)(0, 99)) == ARGUMENT
    assert engine.ncclCommInitAll(comms, 0, None) == ARGUMENT
    assert engine.ncclCommInitAll(None, 2, None) == ARGUMENT
    assert engine.ncclGroupEnd() == USAGE


def halves(rank: Rank) -> tuple[int, int] | None:
    """Odd and even ranks part, in reverse order; the last rank stays out."""
    color = -1 if rank.rank == rank.ranks - 1 else rank.rank % 2
    child = rank.split(color, -rank.rank)
    place = None
    if color == -1:
        assert child.value is None
    else:
        count, number = ctypes.c_int(), ctypes.c_int()
        rank.must("ncclCommCount", child, ctypes.byref(count))
        rank.must("ncclCommUserRank", child, ctypes.byref(number))
        place = (count.value, number.value)
        x = np.full(3, rank.rank, dtype=np.float32)
        rank.must(
            "ncclAllReduce", x.ctypes.data, x.ctypes.data, 3, FLOAT32, SUM, child, rank.stream
        )
        rank.synchronize()
        assert (x == sum(r for r in range(rank.ranks - 1) if r % 2 == color)).all()
        rank.must("ncclCommDestroy", child)
    rank.finish()
    return place


def test_split(engine, temper):
    assert nccl_ranks.run_threads(engine, 5, halves) == [(2, 1), (2, 1), (2, 0), (2, 0), None]


def test_split_between_processes(engine, temper):
    found = nccl_ranks.run_processes(
        engine, 3, halves, environment={"PYNCCL_HOST_TEMPER": temper}
    )
    assert found == [[1, 0], [1, 0], None]


def family(rank: Rank, shared: bool) -> None:
    """A child that shares its parent's resources is aborted with it; another one is not."""
    child = rank.split(0, rank.rank)
    x = np.ones(1, dtype=np.float32)
    if rank.rank == 0:
        rank.must(
            "ncclAllReduce", x.ctypes.data, x.ctypes.data, 1, FLOAT32, SUM, child, rank.stream
        )
        assert rank.pending(0.1)
        rank.must("ncclCommAbort", rank.comm)
        assert rank.pending(0.2) != shared
    else:
        rank.must("ncclCommAbort", rank.comm)
    rank.must("ncclCommAbort", child)
    rank.synchronize()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)


@pytest.mark.parametrize("shared", [False, True])
def test_an_abort_ends_the_family(engine, temper, shared):
    engine.set("runtime_connect", "0")
    try:
        nccl_ranks.run_threads(engine, 2, family, shared, settings={"splitShare": int(shared)})
    finally:
        engine.set("runtime_connect", "1")


def test_split_of_no_communicator(engine, temper):
    child = ctypes.c_void_p(1)
    assert engine.ncclCommSplit(None, 0, 0, ctypes.byref(child), None) == ARGUMENT
    assert engine.ncclGroupEnd() == USAGE


def behind_a_gate(rank: Rank) -> None:
    """One rank's collective is a copy on the user's stream: no order but the stream's."""
    engine = rank.engine
    word = engine.allocate(4)
    gate = ctypes.c_uint32.from_address(word)
    gate.value = 0
    other = engine.stream()
    engine.must("cuStreamWaitValue32_v2", rank.stream, word, 1, 0)
    x, y, z = np.arange(4, dtype=np.float32), np.zeros(4, np.float32), np.zeros(4, np.float32)
    assert rank.all_reduce(x, y) == 0
    arguments = (x.ctypes.data, z.ctypes.data, 4, FLOAT32, SUM, rank.comm, other)
    rank.must("ncclAllReduce", *arguments)
    engine.must("cuStreamSynchronize", other)
    assert (z == x).all()
    rank.must("ncclCommDestroy", rank.comm)
    assert (y == 0).all()
    gate.value = 1
    rank.synchronize()
    assert (y == x).all()
    engine.must("cuMemFree_v2", word)
    for stream in (other, rank.stream):
        engine.must("cuStreamDestroy_v2", stream)


def test_one_rank_copies_on_the_stream_of_the_user(engine, temper):
    nccl_ranks.run_threads(engine, 1, behind_a_gate)


def at_once(rank: Rank) -> None:
    """On one rank a collective runs at its call, also in a group that fails later."""
    x, y = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    rank.must("ncclGroupStart")
    assert rank.all_reduce(x, y) == 0
    rank.synchronize()
    assert (y == x).all()
    assert rank.engine.ncclAllReduce(None, None, 1, 99, SUM, rank.comm, None) == ARGUMENT
    assert rank.engine.ncclGroupEnd() == ARGUMENT
    rank.finish()


def test_one_rank_does_not_wait_for_the_group(engine, temper):
    nccl_ranks.run_threads(engine, 1, at_once)
