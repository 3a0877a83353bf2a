"""Communicators that are stopped and live on: revoke, suspend and resume, memory statistics."""

from __future__ import annotations

import ctypes
import time

import nccl_ranks
import numpy as np
import pytest
from nccl_ranks import ARGUMENT, IN_PROGRESS, REMOTE, USAGE, Rank, last_error

FLOAT32, SUM = 7, 0
MEMORY = 1
SUSPENDABLE, SUSPENDED, PERSISTENT, WHOLE = range(4)


@pytest.fixture
def calm(engine, temper):
    """Without first contact, so that what sticks is the kernel and not the call."""
    engine.set("runtime_connect", "0")
    yield temper
    engine.set("runtime_connect", "1")


def sums(rank: Rank, comm: ctypes.c_void_p) -> float:
    x = np.full(4, rank.rank + 1, dtype=np.float32)
    address = x.ctypes.data
    rank.must("ncclAllReduce", address, address, 4, FLOAT32, SUM, comm, rank.stream)
    rank.synchronize()
    return float(x[0])


# ---- revoke


def revoked(rank: Rank, blocking: bool) -> float:
    """Rank 0 waits in an operation; what is left of the communicator is divided anew."""
    x = np.ones(4, dtype=np.float32)
    if rank.rank == 0:
        assert rank.all_reduce(x) in (0, IN_PROGRESS)
        assert rank.settled() == 0
        assert rank.pending(0.05)
    rank.complete("ncclCommRevoke", rank.comm, 0)
    rank.synchronize()  # the operation has ended
    assert rank.all_reduce(x) == USAGE
    assert "revoked" in last_error(rank.engine)
    if not blocking:  # which keeps even that for good
        rank.abandon()
        return 6.0
    assert rank.engine.ncclCommFinalize(rank.comm) == ARGUMENT
    assert rank.engine.ncclCommRevoke(rank.comm, 0) == ARGUMENT
    child = rank.split(0)
    value = sums(rank, child)
    rank.must("ncclCommDestroy", child)
    begun = time.monotonic()
    rank.must("ncclCommDestroy", rank.comm)
    assert time.monotonic() - begun < 5.0
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return value


@pytest.mark.parametrize("blocking", [True, False])
def test_revoke_ends_what_runs(engine, calm, blocking):
    values = nccl_ranks.run_threads(
        engine, 3, revoked, blocking, settings={"blocking": int(blocking)}
    )
    assert values == [6.0] * 3


def test_revoke_between_processes(engine, temper):
    given = {"PYNCCL_HOST_TEMPER": temper, "NCCL_RUNTIME_CONNECT": "0"}
    assert nccl_ranks.run_processes(engine, 3, revoked, True, environment=given) == [6.0] * 3


def revoke_then_shrink(rank: Rank) -> float | None:
    """After a kill: revoke heals the state, and the survivors shrink in the default mode."""
    x = np.ones(4, dtype=np.float32)
    if rank.rank == 1:
        rank.engine.set("faults", "op:kill")
    assert rank.all_reduce(x) in (0, REMOTE)  # it may be dead by now
    if rank.rank == 1:
        rank.synchronize()
    assert rank.async_error(10.0) == REMOTE
    rank.complete("ncclCommRevoke", rank.comm, 0)
    child = ctypes.c_void_p()
    excluded = (ctypes.c_int * 1)(1)
    rank.must("ncclCommShrink", rank.comm, excluded, 1, ctypes.byref(child), None, 0)
    value = sums(rank, child)
    rank.must("ncclCommDestroy", child)
    rank.must("ncclCommDestroy", rank.comm)  # waits for nobody, for one is dead
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return value


def test_survivors_of_a_kill_revoke_and_shrink(engine, temper):
    given = {"PYNCCL_HOST_TEMPER": temper, "NCCL_RUNTIME_CONNECT": "0"}
    values = nccl_ranks.run_processes(
        engine, 3, revoke_then_shrink, environment=given, exits={1: -9}
    )
    assert values == [4.0, None, 4.0]


def family(rank: Rank) -> list[bool]:
    """A child made before the revoke shares; one made after does not."""
    before = rank.split(0)
    rank.must("ncclCommRevoke", rank.comm, 0)
    after = rank.split(0)
    x = np.ones(4, dtype=np.float32)
    address = x.ctypes.data
    ended = []
    for child in (before, after):
        if rank.rank == 0:
            code = rank.engine.ncclAllReduce(
                address, address, 4, FLOAT32, SUM, child, rank.stream
            )
            assert code == 0, last_error(rank.engine)
            ended.append(rank.pending(0.05))
        else:
            time.sleep(0.4)
        rank.must("ncclCommAbort", child)
    rank.must("ncclCommAbort", rank.comm)
    rank.synchronize()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return ended


def test_a_revoked_parent_shares_nothing(engine, calm):
    values = nccl_ranks.run_threads(engine, 2, family, settings={"splitShare": 1})
    assert values[0] == [True, True]


@pytest.mark.misuse
def test_bad_flags_of_revoke(engine, temper):
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 1, 0)
        rank.join(nccl_ranks.unique_id(engine))
        assert engine.ncclCommRevoke(rank.comm, 1) == ARGUMENT
        rank.must("ncclCommFinalize", rank.comm)
        assert engine.ncclCommRevoke(rank.comm, 0) == ARGUMENT
        rank.must("ncclCommDestroy", rank.comm)
        assert engine.ncclCommRevoke(rank.comm, 0) == ARGUMENT
        engine.must("cuStreamDestroy_v2", rank.stream)


# ---- suspend and resume


def statistic(rank: Rank, which: int) -> int:
    value = ctypes.c_uint64(77)
    rank.must("ncclCommMemStats", rank.comm, which, ctypes.byref(value))
    return value.value


def rest(rank: Rank) -> list[int]:
    engine = rank.engine
    answers = [engine.ncclCommResume(rank.comm), statistic(rank, SUSPENDED)]
    rank.must("ncclCommSuspend", rank.comm, 0)  # nothing is asked for
    answers.append(statistic(rank, SUSPENDED))
    rank.must("ncclCommSuspend", rank.comm, MEMORY)
    answers += [statistic(rank, SUSPENDED), engine.ncclCommSuspend(rank.comm, MEMORY)]
    x = np.ones(4, dtype=np.float32)
    answers.append(rank.all_reduce(x))
    rank.must("ncclCommResume", rank.comm)
    answers.append(statistic(rank, SUSPENDED))
    assert statistic(rank, WHOLE) == statistic(rank, SUSPENDABLE) + statistic(rank, PERSISTENT)
    assert sums(rank, rank.comm) == rank.ranks * (rank.ranks + 1) / 2
    rank.finish()
    return answers


@pytest.mark.parametrize("ranks", [1, 3])
def test_suspend_and_resume(engine, temper, ranks):
    values = nccl_ranks.run_threads(engine, ranks, rest)
    assert values == [[USAGE, 0, 0, 1, USAGE, USAGE, 0]] * ranks


def late(rank: Rank) -> float:
    """Suspend is collective."""
    if rank.rank == 1:
        time.sleep(0.3)
    begun = time.monotonic()
    rank.must("ncclCommSuspend", rank.comm, MEMORY)
    took = time.monotonic() - begun
    rank.abandon()
    return took


def test_suspend_waits_for_the_others(engine, temper):
    assert nccl_ranks.run_threads(engine, 2, late)[0] > 0.2


def shared(rank: Rank) -> int:
    child = rank.split(0)
    code: int = rank.engine.ncclCommSuspend(rank.comm, MEMORY)
    rank.must("ncclCommDestroy", child)
    rank.finish()
    return code


def test_what_is_shared_is_not_suspended(engine, temper):
    settings = {"splitShare": 1}
    assert nccl_ranks.run_threads(engine, 2, shared, settings=settings) == [USAGE] * 2


def test_bad_arguments_of_statistics(engine, temper):
    with nccl_ranks.on_device(engine, 0):
        rank = Rank(engine, 0, 1, 0)
        rank.join(nccl_ranks.unique_id(engine))
        value = ctypes.byref(ctypes.c_uint64())
        assert engine.ncclCommMemStats(rank.comm, WHOLE, None) == ARGUMENT
        assert engine.ncclCommMemStats(rank.comm, 4, value) == ARGUMENT
        assert engine.ncclCommMemStats(None, WHOLE, value) == ARGUMENT
        rank.finish()


def without_manager(rank: Rank) -> list[int]:
    value = ctypes.byref(ctypes.c_uint64())
    codes = [
        rank.engine.ncclCommSuspend(rank.comm, MEMORY),
        rank.engine.ncclCommResume(rank.comm),
        rank.engine.ncclCommMemStats(rank.comm, WHOLE, value),
    ]
    rank.finish()
    return codes


def test_the_memory_manager_can_be_disabled(engine):
    given = {"NCCL_DISABLE_MEM_MANAGER": "1"}
    values = nccl_ranks.run_processes(engine, 1, without_manager, environment=given)
    assert values == [[USAGE] * 3]
