"""NCCL operations on streams that are being captured: recorded, and run at each launch."""

from __future__ import annotations

import ctypes
import threading
import time

import graphs
import nccl_ranks
import numpy as np
import pytest
from nccl_ranks import USAGE, Rank, last_error

FLOAT32, INT32, SUM = 7, 2, 0


def replayed(rank: Rank, graph: int, launches: int = 1) -> None:
    with graphs.executable(rank.engine, graph) as made:
        for _ in range(launches):
            rank.engine.must("cuGraphLaunch", made, rank.stream)
        rank.synchronize()


def sums(rank: Rank) -> list[float]:
    """A captured all-reduce in place, launched three times between others that are not."""
    n = 1000
    total = np.full(n, rank.rank + 1, dtype=np.float32)
    eager = np.ones(1, dtype=np.float32)
    graph = graphs.captured(rank.engine, rank.stream, lambda: rank.all_reduce(total))
    assert (total == rank.rank + 1).all()
    found = []
    with graphs.executable(rank.engine, graph) as made:
        for _ in range(3):
            assert rank.all_reduce(eager) == 0
            rank.engine.must("cuGraphLaunch", made, rank.stream)
            rank.synchronize()
            assert (total == total[0]).all()
            found.append(float(total[0]))
    assert eager[0] == rank.ranks**3
    rank.finish()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_captured_all_reduce_runs_at_each_launch(engine, temper, ranks):
    first = ranks * (ranks + 1) / 2
    expected = [first, first * ranks, first * ranks**2]
    assert nccl_ranks.run_threads(engine, ranks, sums) == [expected] * ranks


def test_the_same_between_processes(engine, temper):
    values = nccl_ranks.run_processes(
        engine, 2, sums, environment={"PYNCCL_HOST_TEMPER": temper}
    )
    assert values == [[3.0, 6.0, 12.0]] * 2


def group(rank: Rank) -> None:
    """Messages round a ring and two collectives in a group, on two streams of a capture."""
    engine, n = rank.engine, 7
    after, before = (rank.rank + 1) % rank.ranks, (rank.rank - 1) % rank.ranks
    mine = np.full(n, rank.rank, dtype=np.int32)
    theirs = np.full(n, -1, dtype=np.int32)
    total = np.full(n, 1, dtype=np.float32)
    spread = np.full(n, rank.rank, dtype=np.float32)
    side = engine.stream()
    forked, joined = engine.event(), engine.event()

    def body() -> None:
        engine.must("cuEventRecord", forked, rank.stream)
        engine.must("cuStreamWaitEvent", side, forked, 0)
        rank.must("ncclGroupStart")
        rank.must("ncclSend", mine.ctypes.data, n, INT32, after, rank.comm, rank.stream)
        rank.must("ncclRecv", theirs.ctypes.data, n, INT32, before, rank.comm, side)
        assert rank.all_reduce(total) == 0
        address = spread.ctypes.data
        rank.must("ncclBroadcast", address, address, n, FLOAT32, 1, rank.comm, side)
        rank.must("ncclGroupEnd")
        engine.must("cuEventRecord", joined, side)
        engine.must("cuStreamWaitEvent", rank.stream, joined, 0)

    replayed(rank, graphs.captured(engine, rank.stream, body), launches=3)
    assert (theirs == before).all()
    assert (total == rank.ranks**3).all()
    assert (spread == 1).all()
    for destroy, made in (("Stream", side), ("Event", forked), ("Event", joined)):
        engine.must(f"cu{destroy}Destroy_v2", made)
    rank.finish()


def test_a_captured_group_of_messages_and_collectives(engine, temper):
    nccl_ranks.run_threads(engine, 2, group)


def mixed(rank: Rank) -> None:
    one = np.ones(1, dtype=np.float32)
    plain = rank.engine.stream()
    address = one.ctypes.data
    graphs.begin(rank.engine, rank.stream)
    rank.must("ncclGroupStart")
    assert rank.all_reduce(one) == 0
    code = rank.engine.ncclAllReduce(address, address, 1, FLOAT32, SUM, rank.comm, plain)
    assert code == 0
    assert rank.engine.ncclGroupEnd() == USAGE
    assert "captured by one graph" in last_error(rank.engine)
    code, graph = graphs.end(rank.engine, rank.stream)
    assert code == 0
    rank.engine.must("cuGraphDestroy", graph)
    assert rank.all_reduce(one) == 0
    rank.synchronize()
    assert one[0] == rank.ranks
    rank.engine.must("cuStreamDestroy_v2", plain)
    rank.finish()


def test_streams_inside_and_outside_of_a_capture_in_one_group(engine, temper):
    engine.set("runtime_connect", "0")  # contact is made before the streams are looked at
    try:
        nccl_ranks.run_threads(engine, 2, mixed)
    finally:
        engine.set("runtime_connect", "1")


def test_one_rank_inside_and_one_outside_of_a_capture_in_one_group(engine, temper):
    comms = (ctypes.c_void_p * 2)()
    nccl_ranks.must(engine, "ncclCommInitAll", comms, 2, (ctypes.c_int * 2)(0, 1))
    one = np.ones(2, dtype=np.float32)
    with nccl_ranks.on_device(engine, 1):
        plain = engine.stream()
    with nccl_ranks.on_device(engine, 0):
        stream = engine.stream()
        graphs.begin(engine, stream)
        nccl_ranks.must(engine, "ncclGroupStart")
        for rank, of_rank in enumerate((stream, plain)):
            address = one.ctypes.data + 4 * rank
            arguments = (address, address, 1, FLOAT32, SUM, comms[rank], of_rank)
            nccl_ranks.must(engine, "ncclAllReduce", *arguments)
        assert engine.ncclGroupEnd() == USAGE
        assert "only one is captured" in last_error(engine)
        code, graph = graphs.end(engine, stream)
        assert code == 0
        engine.must("cuGraphDestroy", graph)
        for made in (stream, plain):
            engine.must("cuStreamDestroy_v2", made)
    for comm in comms:
        nccl_ranks.must(engine, "ncclCommAbort", comm)


def held(rank: Rank, call: str) -> None:
    one = np.ones(1, dtype=np.float32)
    graph = graphs.captured(rank.engine, rank.stream, lambda: rank.all_reduce(one))
    codes: list[int] = []
    ending = threading.Thread(
        target=lambda: codes.append(getattr(rank.engine, call)(rank.comm)), daemon=True
    )
    with graphs.executable(rank.engine, graph) as made:
        rank.engine.must("cuGraphLaunch", made, rank.stream)
        rank.synchronize()
        ending.start()
        time.sleep(0.15)
        assert ending.is_alive(), f"{call} did not wait for the graph"
        assert "graphs that are not destroyed" in last_error(rank.engine)
    ending.join(10)
    assert codes == [0]
    if call == "ncclCommFinalize":
        rank.must("ncclCommDestroy", rank.comm)
    rank.engine.must("cuStreamDestroy_v2", rank.stream)


@pytest.mark.parametrize("call", ["ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"])
def test_a_live_graph_holds_the_communicator(engine, temper, call):
    # processes: of several ranks in one, the last to end is the one that waits
    environment = {"PYNCCL_HOST_TEMPER": temper}
    nccl_ranks.run_processes(engine, 2, held, call, environment=environment)


def alone(rank: Rank) -> None:
    value = np.full(3, 5, dtype=np.float32)
    out = np.zeros(3, dtype=np.float32)
    graph = graphs.captured(rank.engine, rank.stream, lambda: rank.all_reduce(value, out))
    assert (out == 0).all()
    with graphs.executable(rank.engine, graph) as made:
        rank.engine.must("cuGraphLaunch", made, rank.stream)
        rank.synchronize()
        assert (out == 5).all()
        rank.must("ncclCommDestroy", rank.comm)  # a copy, which holds nobody
    rank.engine.must("cuStreamDestroy_v2", rank.stream)


def test_one_rank_alone(engine, temper):
    nccl_ranks.run_threads(engine, 1, alone)


def broken(rank: Rank) -> None:
    one = np.ones(1, dtype=np.float32)
    graphs.begin(rank.engine, rank.stream)
    rank.engine.cuStreamQuery(rank.stream)
    assert rank.all_reduce(one) == nccl_ranks.CUDA
    assert "capture is broken" in last_error(rank.engine)
    graph = ctypes.c_void_p()
    rank.engine.cuStreamEndCapture(rank.stream, ctypes.byref(graph))
    rank.abandon()


def test_a_broken_capture_takes_no_operation(engine, temper):
    nccl_ranks.run_threads(engine, 2, broken)
