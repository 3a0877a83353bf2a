"""Communicators made from others: shrink, grow, and what they share with their parent."""

from __future__ import annotations

import ctypes
import threading
import time

import nccl_ranks
import numpy as np
import pytest
from nccl_ranks import ARGUMENT, REMOTE, SYSTEM, USAGE, Rank, last_error

FLOAT32, SUM = 7, 0
DEFAULT, ABORT = 0, 1
SIGKILLED = -9


@pytest.fixture
def calm(engine, temper):
    """Without first contact, so that what sticks is the kernel and not the call."""
    engine.set("runtime_connect", "0")
    yield temper
    engine.set("mode", "strict")
    engine.set("runtime_connect", "1")


def environment(temper: str, **more: str) -> dict[str, str]:
    return {"PYNCCL_HOST_TEMPER": temper, "NCCL_RUNTIME_CONNECT": "0", **more}


def numbers(*ranks: int) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(ranks))(*ranks)


def shrink(
    rank: Rank, excluded: tuple[int, ...], flags: int = DEFAULT, config: object = None
) -> tuple[int, ctypes.c_void_p]:
    child = ctypes.c_void_p()
    code = rank.engine.ncclCommShrink(
        rank.comm, numbers(*excluded), len(excluded), ctypes.byref(child), config, flags
    )
    return code, child


def total(rank: Rank, comm: ctypes.c_void_p, value: float) -> float:
    """The sum of the values that all ranks of this communicator give."""
    x = np.full(3, value, dtype=np.float32)
    address = x.ctypes.data
    rank.must("ncclAllReduce", address, address, 3, FLOAT32, SUM, comm, rank.stream)
    rank.synchronize()
    return float(x[0])


def place(rank: Rank, comm: ctypes.c_void_p) -> list[int]:
    out = ctypes.c_int()
    found = []
    for name in ("ncclCommUserRank", "ncclCommCount"):
        rank.must(name, comm, ctypes.byref(out))
        found.append(out.value)
    return found


# ---- shrink


def shrunk(rank: Rank, excluded: list[int], flags: int) -> tuple[list[int], float] | None:
    if rank.rank in excluded:
        rank.abandon()
        return None
    code, child = shrink(rank, tuple(excluded), flags)
    assert code == 0, last_error(rank.engine)
    found, value = place(rank, child), total(rank, child, 10.0**rank.rank)
    rank.must("ncclCommDestroy", child)
    rank.abandon()
    return found, value


@pytest.mark.parametrize("flags", [DEFAULT, ABORT])
@pytest.mark.parametrize("excluded", [[1], [3, 0]], ids=str)
def test_shrink_keeps_the_order(engine, temper, excluded, flags):
    values = nccl_ranks.run_threads(engine, 4, shrunk, excluded, flags)
    stay = [n for n in range(4) if n not in excluded]
    wanted = float(sum(10.0**n for n in stay))
    for number, value in enumerate(values):
        expected = None if number in excluded else ([stay.index(number), len(stay)], wanted)
        assert value == expected


def test_shrink_between_processes(engine, temper):
    values = nccl_ranks.run_processes(
        engine, 4, shrunk, [2], DEFAULT, environment=environment(temper)
    )
    assert values[2] is None
    assert [value for n, value in enumerate(values) if n != 2] == [
        [[n, 3], 1011.0] for n in range(3)
    ]


def survive(rank: Rank, how: str) -> float | None:
    """Rank 1 dies, or never comes, while the others are inside an operation."""
    x = np.ones(1000, dtype=np.float32)
    assert rank.all_reduce(x) == 0
    rank.synchronize()
    if rank.rank == 1:
        time.sleep(0.5)  # the others are inside by then
        if how == "killed":
            rank.engine.set("faults", "op:kill")
            assert rank.all_reduce(x) == 0
            rank.synchronize()
        return None  # it ends with its communicator alive, as a process that crashed does
    assert rank.all_reduce(x) == 0
    if how == "killed":
        assert rank.async_error(10.0) == REMOTE
    assert rank.pending(0.05)
    code, child = shrink(rank, (1,), ABORT)
    assert code == 0, last_error(rank.engine)
    rank.synchronize()  # what was stuck has ended
    value = total(rank, child, rank.rank + 1.0)
    rank.must("ncclCommFinalize", child)
    rank.must("ncclCommDestroy", child)
    rank.abandon()
    return value


def test_survivors_of_a_kill_shrink(engine, temper):
    values = nccl_ranks.run_processes(
        engine, 4, survive, "killed", environment=environment(temper), exits={1: SIGKILLED}
    )
    assert values == [8.0, None, 8.0, 8.0]


def stuck(rank: Rank, shrunk: threading.Barrier) -> float | None:
    x = np.ones(1000, dtype=np.float32)
    if rank.rank == 2:
        shrunk.wait(20)
        rank.abandon()
        return None
    assert rank.all_reduce(x) == 0
    assert rank.pending(0.05)
    code, child = shrink(rank, (2,), ABORT)
    assert code == 0, last_error(rank.engine)
    rank.synchronize()
    value = total(rank, child, rank.rank + 1.0)
    shrunk.wait(20)
    assert rank.all_reduce(x) == USAGE  # the parent's ranks may be out of step
    assert "cut off" in last_error(rank.engine)
    rank.must("ncclCommDestroy", child)
    rank.abandon()
    return value


def test_shrink_ends_what_waits_for_a_stuck_peer(engine, calm):
    assert nccl_ranks.run_threads(engine, 3, stuck, threading.Barrier(3)) == [3.0, 3.0, None]


def test_a_second_death_ends_a_shrink(engine, temper):
    """Rank 2 was to stay, and dies instead of asking."""
    values = nccl_ranks.run_processes(
        engine, 3, loses_another, environment=environment(temper), exits={2: SIGKILLED}
    )
    assert values == [REMOTE, 0, None]


def loses_another(rank: Rank) -> int:
    if rank.rank == 2:
        rank.engine.set("faults", "call:kill,name=ncclCommShrink")
    if rank.rank == 1:
        rank.abandon()
        return 0
    code, child = shrink(rank, (1,))
    assert not child.value
    rank.abandon()
    return code


def test_bad_arguments_of_shrink(engine, temper):
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 1, 0)
        rank.join(nccl_ranks.unique_id(engine))
        out = ctypes.c_void_p()
        spot = ctypes.byref(out)
        call = engine.ncclCommShrink
        assert call(None, numbers(1), 1, spot, None, 0) == ARGUMENT
        assert call(rank.comm, None, 1, spot, None, 0) == ARGUMENT
        assert call(rank.comm, numbers(1), 0, spot, None, 0) == ARGUMENT
        assert call(rank.comm, numbers(1), 1, None, None, 0) == ARGUMENT
        for excluded, text in (((0,), "itself"), ((1,), "not in"), ((-1,), "not in")):
            assert shrink(rank, excluded)[0] == ARGUMENT
            assert text in last_error(engine)
        assert engine.ncclGroupEnd() == USAGE
        rank.finish()


def listed(rank: Rank) -> list[int]:
    if rank.rank != 0:
        rank.abandon()
        return []
    assert shrink(rank, (1, 1))[0] == ARGUMENT
    assert "listed twice" in last_error(rank.engine)
    given, out = numbers(2, 1), ctypes.c_void_p()
    rank.must("ncclCommShrink", rank.comm, given, 2, ctypes.byref(out), None, 0)
    rank.must("ncclCommDestroy", out)
    rank.abandon()
    return list(given)


def test_the_list_is_sorted_in_place(engine, temper):
    assert nccl_ranks.run_threads(engine, 3, listed)[0] == [1, 2]


def differ(rank: Rank) -> int:
    code, child = shrink(rank, ((rank.rank + 1) % 3,))
    assert not child.value
    rank.abandon()
    return code


def test_ranks_that_exclude_different_ones_are_told(engine, temper):
    codes = nccl_ranks.run_threads(engine, 3, differ)
    assert USAGE in codes
    assert 0 not in codes


# ---- what children share


def family(rank: Rank, flags: int) -> list[bool]:
    """Whether an abort of the child ends what the parent waits for."""
    if rank.rank == 1:
        time.sleep(0.4)
        rank.abandon()
        return []
    code, child = shrink(rank, (1,), flags)
    assert code == 0
    x = np.ones(10, dtype=np.float32)
    assert rank.all_reduce(x) in (0, USAGE)
    rank.must("ncclCommAbort", child)
    ended = not rank.pending(0.1)
    rank.abandon()
    return [ended]


@pytest.mark.parametrize(("flags", "share", "ended"), [(0, 1, True), (0, 0, False)])
def test_shrink_shares_resources_if_it_is_told_to(engine, calm, flags, share, ended):
    values = nccl_ranks.run_threads(engine, 2, family, flags, settings={"shrinkShare": share})
    assert values[0] == [ended]


# ---- grow


class Growing:
    """What the threads of one grow hand to each other outside of NCCL."""

    def __init__(self, engine, old: int, new: int, coordinator: int) -> None:
        self.engine = engine
        self.old, self.new, self.coordinator = old, new, coordinator
        self.unique = nccl_ranks.hostlib.UniqueId()
        self.made = threading.Event()

    def existing(self, rank: Rank) -> tuple[list[int], float]:
        if rank.rank == self.coordinator:
            self.make_id(rank)  # gpulike: it returns when ranks 0 and n - 1 are in ncclCommGrow
        child = ctypes.c_void_p()
        given = ctypes.byref(self.unique) if self.old == 1 else None
        code = self.engine.ncclCommGrow(
            rank.comm, self.new, given, -1, ctypes.byref(child), None
        )
        assert code == 0, last_error(self.engine)
        return self.use(rank, child)

    def make_id(self, rank: Rank) -> None:
        rank.must("ncclCommGetUniqueId", rank.comm, ctypes.byref(self.unique))
        self.made.set()

    def added(self, number: int) -> tuple[list[int], float]:
        with nccl_ranks.on_device(self.engine, number):
            rank = Rank(self.engine, number, self.new, number)
            assert self.made.wait(20)
            given, spot = ctypes.byref(self.unique), ctypes.byref(rank.comm)
            code = self.engine.ncclCommGrow(None, self.new, given, number, spot, None)
            assert code == 0, last_error(self.engine)
            value = self.use(rank, rank.comm)
            self.engine.must("cuStreamDestroy_v2", rank.stream)
            return value

    def use(self, rank: Rank, comm: ctypes.c_void_p) -> tuple[list[int], float]:
        found = place(rank, comm)
        value = total(rank, comm, 10.0 ** found[0])
        rank.must("ncclCommDestroy", comm)
        return found, value


def grown(rank: Rank, growing: Growing) -> tuple[list[int], float]:
    value = growing.existing(rank)
    rank.finish()
    return value


@pytest.mark.parametrize(("old", "coordinator"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_a_communicator_grows(engine, temper, old, coordinator):
    new = old + 2
    growing = Growing(engine, old, new, coordinator)
    values: dict[int, object] = {}
    late = [
        threading.Thread(target=lambda n=n: values.update({n: growing.added(n)}))
        for n in range(old, new)
    ]
    for thread in late:
        thread.start()
    for number, value in enumerate(nccl_ranks.run_threads(engine, old, grown, growing)):
        values[number] = value
    for thread in late:
        thread.join(20)
    wanted = float(sum(10.0**n for n in range(new)))
    assert values == {n: ([n, new], wanted) for n in range(new)}


def test_bad_arguments_of_grow(engine, temper):
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 1, 0)
        rank.join(nccl_ranks.unique_id(engine))
        out, unique = ctypes.c_void_p(), nccl_ranks.hostlib.UniqueId()
        spot, id_ = ctypes.byref(out), ctypes.byref(unique)
        grow = engine.ncclCommGrow
        assert grow(rank.comm, 1, id_, -1, spot, None) == ARGUMENT
        assert grow(rank.comm, 2, id_, 0, spot, None) == ARGUMENT
        assert grow(rank.comm, 2, id_, -1, None, None) == ARGUMENT
        assert grow(rank.comm, 2, None, -1, spot, None) == ARGUMENT
        assert grow(rank.comm, 65, id_, -1, spot, None) == ARGUMENT
        assert not out.value
        assert engine.ncclCommGetUniqueId(rank.comm, None) == ARGUMENT
        rank.must("ncclCommGetUniqueId", rank.comm, id_)
        assert engine.ncclCommGetUniqueId(rank.comm, id_) == USAGE
        assert "not been used yet" in last_error(engine)
        assert engine.ncclGroupEnd() == USAGE
        rank.finish()


def waits(rank: Rank) -> float:
    """No new rank comes; the new communicator can be aborted, and the parent lives on."""
    unique = nccl_ranks.hostlib.UniqueId()
    child = ctypes.c_void_p()
    rank.must("ncclCommGetUniqueId", rank.comm, ctypes.byref(unique))
    failures: list[int] = []

    def grow() -> None:
        with nccl_ranks.on_device(rank.engine, 0):
            failures.append(
                rank.engine.ncclCommGrow(
                    rank.comm, 2, ctypes.byref(unique), -1, ctypes.byref(child), None
                )
            )

    thread = threading.Thread(target=grow)
    thread.start()
    while not child.value:
        time.sleep(0.001)
    time.sleep(0.05)
    begun = time.monotonic()
    rank.must("ncclCommAbort", child)
    took = time.monotonic() - begun
    thread.join(20)
    assert failures == [nccl_ranks.INTERNAL]
    assert total(rank, rank.comm, 5.0) == 5.0
    rank.finish()
    return took


def test_an_abort_ends_a_grow(engine, temper):
    assert nccl_ranks.run_threads(engine, 1, waits)[0] < 1.0


# ---- several unique ids


def test_several_ids(engine, temper):
    unique = [nccl_ranks.unique_id(engine) for _ in range(2)]
    together = (nccl_ranks.hostlib.UniqueId * 2)(*unique)
    values: dict[int, float] = {}

    def one(number: int) -> None:
        with nccl_ranks.on_device(engine, number):
            rank = Rank(engine, number, 3, number)
            spot = ctypes.byref(rank.comm)
            rank.must("ncclCommInitRankScalable", spot, 3, number, 2, together, None)
            values[number] = total(rank, rank.comm, number + 1.0)
            rank.finish()

    threads = [threading.Thread(target=one, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert values == {0: 6.0, 1: 6.0, 2: 6.0}
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 1, 0)
        spot = ctypes.byref(rank.comm)
        call = engine.ncclCommInitRankScalable
        assert call(spot, 1, 0, 0, together, None) == ARGUMENT
        assert call(spot, 1, 0, 2, together, None) == ARGUMENT
        assert call(spot, 1, 0, 1, None, None) == ARGUMENT
        other = (nccl_ranks.hostlib.UniqueId * 2)()
        assert call(spot, 2, 0, 2, other, None) == SYSTEM  # not of this engine
        assert not rank.comm.value
        engine.must("cuStreamDestroy_v2", rank.stream)
    assert engine.ncclGroupEnd() == USAGE


def test_different_lists_of_ids_are_told(engine, temper):
    first, *others = (nccl_ranks.unique_id(engine) for _ in range(3))
    codes: dict[int, int] = {}

    def one(number: int) -> None:
        with nccl_ranks.on_device(engine, number):
            rank = Rank(engine, number, 2, number)
            given = (nccl_ranks.hostlib.UniqueId * 2)(first, others[number])
            codes[number] = engine.ncclCommInitRankScalable(
                ctypes.byref(rank.comm), 2, number, 2, given, None
            )
            rank.abandon()

    threads = [threading.Thread(target=one, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert codes == {0: USAGE, 1: USAGE}
