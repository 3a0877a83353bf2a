"""Non-blocking communicators: what each call answers, where to poll, what errors leave."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

import hostlib
import nccl_ranks
import numpy as np
import pytest
from nccl_ranks import ARGUMENT, IN_PROGRESS, INTERNAL, USAGE, NcclError, Rank, last_error

FLOAT32, SUM = 7, 0
NONBLOCKING = {"blocking": 0}
SOON = (0, IN_PROGRESS)
"""What a call answers that has started something in the background."""


@pytest.fixture
def slow(engine, temper):
    """What goes to the background begins there 100 ms later."""
    engine.set("faults", "background:delay=100ms")
    yield temper
    engine.set("faults", "")


@contextlib.contextmanager
def in_group(engine, ends=(0,)):
    """A group; `ends` is what its end may answer."""
    assert engine.ncclGroupStart() == 0
    yield
    assert engine.ncclGroupEnd() in ends


def queries(rank: Rank) -> set[int]:
    """What the queries of rank, size and device answer."""
    out = ctypes.byref(ctypes.c_int())
    names = ("ncclCommCount", "ncclCommUserRank", "ncclCommCuDevice")
    return {getattr(rank.engine, name)(rank.comm, out) for name in names}


# ---- creation


def start(rank: Rank, unique: hostlib.UniqueId) -> int:
    code: int = rank.engine.ncclCommInitRankConfig(
        ctypes.byref(rank.comm),
        rank.ranks,
        unique,
        rank.rank,
        nccl_ranks.config(**NONBLOCKING),
    )
    return code


def test_one_thread_makes_two_ranks_one_after_the_other(engine, temper):
    """Without a group, which would block for ever on blocking communicators."""
    unique = nccl_ranks.unique_id(engine)
    ranks = []
    with contextlib.ExitStack() as devices:
        for number in range(2):
            devices.enter_context(nccl_ranks.on_device(engine, number))
            ranks.append(Rank(engine, number, 2, number))
            assert start(ranks[-1], unique) == IN_PROGRESS or number == 1
        assert [rank.settled() for rank in ranks] == [0, 0]
        assert [queries(rank) for rank in ranks] == [{0}, {0}]
        for rank in ranks:
            assert engine.ncclCommFinalize(rank.comm) in SOON
        for rank in ranks:
            assert rank.settled() == 0
            rank.must("ncclCommDestroy", rank.comm)
            engine.must("cuStreamDestroy_v2", rank.stream)


def test_everything_is_refused_while_in_progress(engine, slow):
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 1, 0)
        assert start(rank, nccl_ranks.unique_id(engine)) == IN_PROGRESS
        assert rank.comm.value  # published at once
        assert rank.state() == IN_PROGRESS
        assert queries(rank) == {ARGUMENT}
        assert "still in progress" in last_error(engine)
        assert engine.ncclCommDestroy(rank.comm) == ARGUMENT
        assert rank.settled() == 0
        assert queries(rank) == {0}
        rank.finish()


def test_an_abort_ends_an_init_whose_peer_never_comes(engine, temper):
    live = engine.live()
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 2, 0)
        assert start(rank, nccl_ranks.unique_id(engine)) == IN_PROGRESS
        time.sleep(0.05)
        assert rank.state() == IN_PROGRESS
        begun = time.monotonic()
        rank.must("ncclCommAbort", rank.comm)
        assert time.monotonic() - begun < 1.0
        engine.must("cuStreamDestroy_v2", rank.stream)
    assert engine.live()["communicators"] == live["communicators"]


def test_the_environment_beats_the_configuration(engine, temper):
    given = {"NCCL_COMM_BLOCKING": "0", "PYNCCL_HOST_FAULTS": "background:delay=100ms"}
    values = nccl_ranks.run_processes(
        engine,
        2,
        begins_by_environment,
        environment={"PYNCCL_HOST_TEMPER": temper, **given},
        settings={"blocking": 1},
    )
    assert values == [[0, IN_PROGRESS]] * 2


def begins_by_environment(rank: Rank) -> list[int]:
    """InitRank, which never says that it is in progress, and a group of it that does."""
    extra = Rank(rank.engine, 0, 1, 0)
    unique = nccl_ranks.unique_id(rank.engine)
    code = rank.engine.ncclCommInitRank(ctypes.byref(extra.comm), 1, unique, 0)
    answers = [code, extra.state()]
    assert extra.settled() == 0
    extra.finish()
    rank.finish()
    return answers


def test_kinds_do_not_mix_in_a_group_of_jobs(engine, temper):
    with nccl_ranks.on_device(engine, 0):
        first, second = Rank(engine, 0, 1, 0), Rank(engine, 0, 1, 0)
        with in_group(engine, ends=(ARGUMENT,)):
            assert start(first, nccl_ranks.unique_id(engine)) in SOON
            code = engine.ncclCommInitRank(
                ctypes.byref(second.comm), 1, nccl_ranks.unique_id(engine), 0
            )
            assert code == ARGUMENT
            assert "blocking and non-blocking" in last_error(engine)
        assert not second.comm.value
        assert first.state() == ARGUMENT  # it was in the group that failed
        first.abandon()
        engine.must("cuStreamDestroy_v2", second.stream)


# ---- operations


def sums(rank: Rank) -> tuple[float, list[int]]:
    x = np.full(3000, rank.rank + 1, dtype=np.float32)
    codes = []
    for _ in range(5):
        codes.append(rank.all_reduce(x))
        assert rank.settled() == 0
    rank.synchronize()
    rank.finish()
    return float(x[0]), codes


def test_sums_between_threads(engine, temper):
    for value, codes in nccl_ranks.run_threads(engine, 3, sums, settings=NONBLOCKING):
        assert value == 6.0 * 3**4
        assert set(codes) <= set(SOON)


def test_sums_between_processes(engine, temper):
    given = {"PYNCCL_HOST_TEMPER": temper}
    values = nccl_ranks.run_processes(engine, 3, sums, environment=given, settings=NONBLOCKING)
    assert [value for value, _ in values] == [6.0 * 3**4] * 3


def overtake(rank: Rank) -> bool:
    """Whether an event that is recorded at once says that it is done before the sum is."""
    x = np.ones(4, dtype=np.float32)
    event = rank.engine.event()
    assert rank.all_reduce(x) == IN_PROGRESS
    rank.engine.must("cuEventRecord", event, rank.stream)
    rank.engine.must("cuEventSynchronize", event)
    early = bool((x == 1.0).all())
    assert rank.settled() == 0
    rank.engine.must("cuEventRecord", event, rank.stream)
    rank.engine.must("cuEventSynchronize", event)
    assert (x == rank.ranks).all()
    rank.engine.must("cuEventDestroy_v2", event)
    rank.finish()
    return early


def test_an_event_recorded_at_once_overtakes_the_kernel(engine, slow):
    assert nccl_ranks.run_threads(engine, 2, overtake, settings=NONBLOCKING) == [True, True]


def grouped(rank: Rank) -> list[int]:
    x, y = np.ones(3, dtype=np.float32), np.ones(5, dtype=np.float32)
    with in_group(rank.engine, ends=(IN_PROGRESS,)):
        codes = [rank.all_reduce(x), rank.all_reduce(y)]
    codes.append(rank.state())
    codes.append(rank.all_reduce(x))  # the rule is to poll first
    text = last_error(rank.engine)
    assert "still in progress" in text, text
    codes.append(rank.settled())
    rank.abandon()
    return codes


def test_a_group_answers_that_it_is_in_progress(engine, slow):
    """An operation that comes too soon is an error, and the communicator keeps it for good."""
    for codes in nccl_ranks.run_threads(engine, 2, grouped, settings=NONBLOCKING):
        assert codes == [0, 0, IN_PROGRESS, ARGUMENT, ARGUMENT]


def test_a_group_of_nothing_ends_at_once(engine, temper):
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 1, 0)
        rank.configure(nccl_ranks.unique_id(engine), **NONBLOCKING)
        x = np.ones(3, dtype=np.float32)
        with in_group(engine):
            assert rank.all_reduce(x) == 0  # one rank: done at the call
            assert rank.all_reduce(x, count=0) == 0
        rank.finish()


def test_a_bad_argument_is_for_good(engine, temper):
    """On a blocking communicator the same is forgotten."""
    for members, then in ((NONBLOCKING, ARGUMENT), ({"blocking": 1}, 0)):
        with nccl_ranks.on_device(engine, 0):
            rank = Rank(engine, 0, 1, 0)
            rank.configure(nccl_ranks.unique_id(engine), **members)
            x = np.ones(3, dtype=np.float32)
            assert rank.all_reduce(x, op=77) == ARGUMENT
            assert rank.state() == then
            assert rank.all_reduce(x) == then
            rank.abandon()


def stay(rank: Rank) -> int:
    """A blocking communicator in a group that the last one makes non-blocking."""
    other = Rank(rank.engine, 0, 1, rank.device)
    other.configure(nccl_ranks.unique_id(rank.engine), **NONBLOCKING)
    pair = ctypes.c_void_p()
    rank.must(
        "ncclCommSplit", rank.comm, 0, 0, ctypes.byref(pair), nccl_ranks.config(blocking=0)
    )
    x, y = np.ones(3, dtype=np.float32), np.ones(3, dtype=np.float32)
    with in_group(rank.engine, ends=(IN_PROGRESS,)):
        assert rank.all_reduce(x) == 0
        address = y.ctypes.data
        assert (
            rank.engine.ncclAllReduce(address, address, 3, FLOAT32, SUM, pair, rank.stream) == 0
        )
    assert rank.settled(pair) == 0
    rank.synchronize()
    assert (x == rank.ranks).all()
    assert (y == rank.ranks).all()
    state = rank.state()
    rank.must("ncclCommAbort", pair)
    other.abandon()
    rank.abandon()
    return state


def test_a_blocking_communicator_in_a_non_blocking_group_stays_in_progress(engine, temper):
    engine.set("runtime_connect", "0")
    assert nccl_ranks.run_threads(engine, 2, stay) == [IN_PROGRESS] * 2
    engine.set("runtime_connect", "1")


def test_an_abort_ends_a_launch_that_waits_for_its_peer(engine):
    """First contact blocks the thread in the background, and the caller never."""
    engine.set("temper", "gpulike")
    alone = nccl_ranks.run_threads(engine, 2, contact, settings=NONBLOCKING)
    engine.set("temper", "quick")
    assert alone[0] < 1.0


def contact(rank: Rank) -> float:
    if rank.rank == 1:
        time.sleep(0.3)
        rank.abandon()
        return 0.0
    x = np.ones(3, dtype=np.float32)
    assert rank.all_reduce(x) == IN_PROGRESS
    time.sleep(0.05)
    assert rank.state() == IN_PROGRESS
    begun = time.monotonic()
    rank.abandon()
    return time.monotonic() - begun


# ---- finalize, destroy, split


def finalized(rank: Rank) -> list[int]:
    codes = [rank.engine.ncclCommFinalize(rank.comm), rank.state(), rank.settled()]
    rank.must("ncclCommDestroy", rank.comm)
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return codes


def test_finalize_is_in_progress(engine, slow):
    for codes in nccl_ranks.run_threads(engine, 2, finalized, settings=NONBLOCKING):
        assert codes == [IN_PROGRESS, IN_PROGRESS, 0]


def divided(rank: Rank) -> tuple[list[int], bool, float]:
    child = ctypes.c_void_p(77)
    code = rank.engine.ncclCommSplit(
        rank.comm, rank.rank % 2, 0, ctypes.byref(child), nccl_ranks.config(blocking=0)
    )
    codes = [code, rank.state()]
    empty = child.value is None
    codes.append(rank.settled())
    codes.append(rank.state(child))
    x = np.full(4, rank.rank, dtype=np.float32)
    address = x.ctypes.data
    code = rank.engine.ncclAllReduce(address, address, 4, FLOAT32, SUM, child, rank.stream)
    assert code in SOON
    assert rank.settled(child) == 0
    rank.synchronize()
    rank.must("ncclCommDestroy", child)
    rank.finish()
    return codes, empty, float(x[0])


def test_a_split_is_polled_on_the_parent(engine, slow):
    """It answers 0, and the child is NULL until the parent says that it is done."""
    values = nccl_ranks.run_threads(engine, 4, divided, settings=NONBLOCKING)
    assert [codes for codes, _, _ in values] == [[0, IN_PROGRESS, 0, 0]] * 4
    assert all(empty for _, empty, _ in values)
    assert [value for _, _, value in values] == [2.0, 4.0, 2.0, 4.0]


def test_a_failed_background_group_is_told_by_its_communicators(engine, temper):
    engine.set("faults", "background:fail=3")
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 1, 0)
        with pytest.raises(NcclError) as failed:
            rank.configure(nccl_ranks.unique_id(engine), **NONBLOCKING)
        assert failed.value.code == INTERNAL
        assert queries(rank) == {INTERNAL}
        rank.abandon()
    engine.set("faults", "")
    assert engine.ncclGroupEnd() == USAGE


def test_threads_in_the_background_end_by_themselves(engine, temper):
    before = engine.live()
    for _ in range(5):
        nccl_ranks.run_threads(engine, 2, sums, settings=NONBLOCKING)
    for _ in range(200):
        if engine.live()["threads"] <= before["threads"]:
            break
        time.sleep(0.01)
    names = [thread.name for thread in threading.enumerate()]
    assert engine.live()["threads"] <= before["threads"], names
