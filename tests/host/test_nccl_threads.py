"""Several host threads on one communicator or device, and the journal of their calls."""

from __future__ import annotations

import ctypes
import threading
import time

import nccl_ranks
import numpy as np
import pytest
from nccl_ranks import ARGUMENT, INTERNAL, USAGE, Rank

FLOAT32, SUM = 7, 0


@pytest.fixture
def slow_launches(engine):
    """A launch takes 100 ms, so that another thread comes across it."""
    engine.set("temper", "gpulike")
    engine.set("launch_cost_us", "100000")
    engine.set("runtime_connect", "0")
    yield
    engine.set("runtime_connect", "1")
    engine.set("launch_cost_us", "")
    engine.set("temper", "quick")


def launch_twice(rank: Rank) -> list[int]:
    """Rank 0 launches from two threads at a time, on two communicators of one device."""
    other = rank.split(0, rank.rank)
    x = np.ones(4, dtype=np.float32)
    codes = []

    def launch(comm: ctypes.c_void_p, delay: float) -> None:
        time.sleep(delay)
        with nccl_ranks.on_device(rank.engine, rank.device):
            code = rank.engine.ncclAllReduce(
                x.ctypes.data, x.ctypes.data, 4, FLOAT32, SUM, comm, rank.stream
            )
        codes.append(code)

    if rank.rank == 0:
        threads = [
            threading.Thread(target=launch, args=(comm, 0.03 * k))
            for k, comm in enumerate((rank.comm, other))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rank.must("ncclCommAbort", other)
    rank.abandon()
    return sorted(codes)


def test_two_threads_may_not_launch_on_one_device(engine, slow_launches):
    """One of them is told so, as NCCL does where it notices."""
    assert nccl_ranks.run_threads(engine, 2, launch_twice) == [[0, USAGE], []]


def under_fire(rank: Rank, delay: float) -> None:
    """Another thread aborts in the middle of traffic; calls that come after are refused."""
    x = np.ones(20_000, dtype=np.float32)
    timer = threading.Timer(delay, lambda: rank.must("ncclCommAbort", rank.comm))
    timer.start()
    code = number = 0
    while code == 0:
        number += 1
        code = rank.all_reduce(x, count=1 + number * 997 % x.size)
    assert code in (ARGUMENT, INTERNAL)
    timer.join()
    rank.synchronize()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)


@pytest.mark.misuse
@pytest.mark.parametrize("delay_ms", [0, 1, 5, 20])
def test_abort_in_the_middle_of_traffic(engine, temper, delay_ms):
    before = engine.live()["communicators"]
    for _ in range(3):
        nccl_ranks.run_threads(engine, 2, under_fire, delay_ms / 1000)
    assert engine.live()["communicators"] == before


def end_a_group(engine, depths: list[int]) -> None:
    depths.append(engine.ncclGroupEnd())


def test_a_group_belongs_to_its_thread(engine):
    depths: list[int] = []
    nccl_ranks.must(engine, "ncclGroupStart")
    thread = threading.Thread(target=end_a_group, args=(engine, depths))
    thread.start()
    thread.join()
    nccl_ranks.must(engine, "ncclGroupEnd")
    assert depths == [USAGE]


def test_the_journal_has_every_call(engine, temper):
    with engine.journal() as calls:
        nccl_ranks.run_threads(engine, 1, journaled)
    mine = [call for call in calls if call.function.startswith(b"nccl")]
    wanted = [b"ncclGetUniqueId", b"ncclCommInitRank", b"ncclGroupStart", b"ncclBroadcast"]
    wanted += [b"ncclGroupEnd", b"ncclCommFinalize", b"ncclCommDestroy"]
    assert [call.function for call in mine] == wanted
    call = mine[3]
    assert (call.count, call.datatype, call.root, call.rank) == (3, FLOAT32, 0, 0)
    assert (call.group_depth, call.device, call.result) == (1, 0, 0)
    assert call.comm == mine[5].comm != 0
    assert [c.group_depth for c in mine] == [0, 0, 0, 1, 1, 0, 0]


def journaled(rank: Rank) -> None:
    x = np.ones(3, dtype=np.float32)
    address = x.ctypes.data
    rank.must("ncclGroupStart")
    rank.must("ncclBroadcast", address, address, 3, FLOAT32, 0, rank.comm, rank.stream)
    rank.must("ncclGroupEnd")
    rank.finish()
