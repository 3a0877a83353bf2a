"""What goes wrong: ranks that disagree, peers that die, what sticks, injected faults."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

import hostlib
import nccl_ranks
import numpy as np
import pytest
from nccl_ranks import ARGUMENT, IN_PROGRESS, INTERNAL, REMOTE, SYSTEM, USAGE, Rank, last_error

FLOAT32, INT32, SUM, MAX = 7, 2, 0, 2
GONE_LIMIT_S = 1.0
"""How soon a survivor must hear of a dead peer."""


@pytest.fixture
def calm(engine, temper):
    """Without first contact, so that what sticks is the kernel and not the call."""
    engine.set("runtime_connect", "0")
    yield temper
    engine.set("mode", "strict")
    engine.set("faults", "")
    engine.set("runtime_connect", "1")


def environment(temper: str, **more: str) -> dict[str, str]:
    return {"PYNCCL_HOST_TEMPER": temper, **more}


# ---- ranks that disagree

CALLS = {
    "count": (
        ("ncclAllReduce", (4, FLOAT32, SUM), "ncclAllReduce(count=4, float32, sum)"),
        ("ncclAllReduce", (8, FLOAT32, SUM), "ncclAllReduce(count=8, float32, sum)"),
    ),
    "type": (
        ("ncclAllGather", (4, FLOAT32), "ncclAllGather(count=4, float32)"),
        ("ncclAllGather", (4, INT32), "ncclAllGather(count=4, int32)"),
    ),
    "operator": (
        ("ncclAllReduce", (4, FLOAT32, SUM), "ncclAllReduce(count=4, float32, sum)"),
        ("ncclAllReduce", (4, FLOAT32, MAX), "ncclAllReduce(count=4, float32, max)"),
    ),
    "root": (
        ("ncclBroadcast", (4, FLOAT32, 0), "ncclBroadcast(count=4, float32, root=0)"),
        ("ncclBroadcast", (4, FLOAT32, 1), "ncclBroadcast(count=4, float32, root=1)"),
    ),
    "function": (
        ("ncclReduce", (4, FLOAT32, SUM, 0), "ncclReduce(count=4, float32, sum, root=0)"),
        ("ncclAllGather", (4, FLOAT32), "ncclAllGather(count=4, float32)"),
    ),
    "line and slot": (
        ("ncclAllReduce", (1, FLOAT32, SUM), "ncclAllReduce(count=1, float32, sum)"),
        ("ncclAllReduce", (99_999, FLOAT32, SUM), "ncclAllReduce(count=99999, float32, sum)"),
    ),
}


def disagree(rank: Rank, name: str) -> tuple[int, str]:
    """The second operation differs; the first is in order."""
    x, y = np.ones(100_000, dtype=np.float32), np.zeros(400_000, dtype=np.float32)
    assert rank.all_reduce(x, y, count=3) == 0
    rank.synchronize()
    function, arguments, _ = CALLS[name][rank.rank == rank.ranks - 1]
    code = getattr(rank.engine, function)(
        x.ctypes.data, y.ctypes.data, *arguments, rank.comm, rank.stream
    )
    assert code == 0
    error = rank.async_error(2.0)
    text = last_error(rank.engine)
    assert rank.pending(0.05)  # stuck until aborted, as on a GPU
    assert rank.all_reduce(x) == error  # and nothing new is taken
    rank.must("ncclCommAbort", rank.comm)
    rank.synchronize()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return error, text


def mismatch_text(name: str, ranks: int) -> str:
    (_, _, first), (_, _, second) = CALLS[name]
    return f"mismatch: operation 2: rank 0 calls {first}, rank {ranks - 1} calls {second}"


@pytest.mark.parametrize("name", CALLS)
def test_a_mismatch_names_both_sides(engine, calm, name):
    for error, text in nccl_ranks.run_threads(engine, 3, disagree, name):
        assert (error, text) == (USAGE, mismatch_text(name, 3))


def test_a_mismatch_between_processes(engine, temper):
    given = environment(temper, NCCL_RUNTIME_CONNECT="0")
    found = nccl_ranks.run_processes(engine, 2, disagree, "count", environment=given)
    assert found == [[USAGE, mismatch_text("count", 2)]] * 2


def meet_elsewhere(rank: Rank) -> tuple[int, str, int]:
    """Two ranks make first contact in different functions: the call itself waits."""
    x, y = np.ones(4, dtype=np.float32), np.zeros(8, dtype=np.float32)
    function, arguments, _ = CALLS["function"][rank.rank]
    heard = []

    def listen() -> None:
        heard.append((rank.async_error(5.0), last_error(rank.engine)))
        rank.must("ncclCommAbort", rank.comm)

    thread = threading.Thread(target=listen)
    thread.start()
    code = getattr(rank.engine, function)(
        x.ctypes.data, y.ctypes.data, *arguments, rank.comm, rank.stream
    )
    thread.join()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return (*heard[0], code)


def test_a_mismatch_at_first_contact(engine):
    found = nccl_ranks.run_processes(
        engine, 2, meet_elsewhere, environment=environment("gpulike")
    )
    text = mismatch_text("function", 2).replace("operation 2", "operation 1")
    assert found == [[USAGE, text, INTERNAL]] * 2


def one_is_first(rank: Rank) -> tuple[int, str]:
    """One rank waits in a kernel, the other in the call that makes first contact."""
    x = np.ones(4, dtype=np.float32)
    assert rank.all_reduce(x) == 0
    rank.synchronize()
    if rank.rank == 0:
        assert rank.all_reduce(x) == 0
        heard = (rank.async_error(5.0), last_error(rank.engine))
        rank.abandon()
        return heard
    return meet_elsewhere(rank)[:2]


def test_a_mismatch_of_a_kernel_and_a_first_contact(engine):
    found = nccl_ranks.run_processes(
        engine, 2, one_is_first, environment=environment("gpulike")
    )
    assert [error for error, _ in found] == [USAGE, USAGE]
    assert found[0][1] == found[1][1]
    assert "rank 0 calls ncclAllReduce(count=4, float32, sum)" in found[0][1]


def disagree_on_a_message(rank: Rank) -> tuple[int, str]:
    x = np.zeros(8, dtype=np.float32)
    if rank.rank == 0:
        rank.must("ncclSend", x.ctypes.data, 4, FLOAT32, 1, rank.comm, rank.stream)
    else:
        rank.must("ncclRecv", x.ctypes.data, 8, INT32, 0, rank.comm, rank.stream)
    heard = (rank.async_error(2.0), last_error(rank.engine))
    rank.must("ncclCommAbort", rank.comm)
    rank.synchronize()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return heard


def test_a_mismatch_of_messages(engine, temper):
    text = (
        "mismatch: message 1 from rank 0 to rank 1: rank 0 calls ncclSend(count=4, float32), "
        "rank 1 calls ncclRecv(count=8, int32)"
    )
    found = nccl_ranks.run_processes(
        engine, 2, disagree_on_a_message, environment=environment(temper)
    )
    assert found == [[USAGE, text]] * 2


def pass_by(rank: Rank) -> tuple[int, str]:
    """Rank 1 waits for a message, rank 0 has gone on to the next collective without it."""
    x = np.zeros(8, dtype=np.float32)
    arguments = (x.ctypes.data, 4, FLOAT32, 0, rank.comm, rank.stream)
    out: list[tuple[int, str]] = []
    thread = threading.Thread(
        target=lambda: out.append((rank.async_error(5.0), last_error(rank.engine)))
    )
    thread.start()
    stopper = threading.Timer(1.0, lambda: rank.must("ncclCommAbort", rank.comm))
    stopper.start()
    code = rank.all_reduce(x) if rank.rank == 0 else rank.engine.ncclRecv(*arguments)
    assert code in (0, INTERNAL)
    thread.join()
    stopper.join()
    rank.synchronize()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return out[0]


def test_a_mismatch_of_a_message_and_a_collective(engine, temper):
    found = nccl_ranks.run_processes(engine, 2, pass_by, environment=environment(temper))
    text = (
        "mismatch: operation 1: rank 0 calls ncclAllReduce(count=8, float32, sum), "
        "rank 1 calls ncclRecv(count=4, float32)"
    )
    assert found == [[USAGE, text]] * 2


def wait_in_turn(rank: Rank) -> None:
    """Rank 1 waits for rank 2 before it joins the collective: late, but in order."""
    x = np.zeros(4, dtype=np.float32)
    if rank.rank == 1:
        rank.must("ncclRecv", x.ctypes.data, 4, FLOAT32, 2, rank.comm, rank.stream)
    if rank.rank == 2:
        time.sleep(0.5)
        rank.must("ncclSend", x.ctypes.data, 4, FLOAT32, 1, rank.comm, rank.stream)
    assert rank.all_reduce(x) == 0
    rank.synchronize()
    assert rank.async_error() == 0
    rank.finish()


def test_a_late_message_is_no_mismatch(engine, temper):
    nccl_ranks.run_threads(engine, 3, wait_in_turn)


def wrong_sizes(rank: Rank) -> None:
    """Without checks nothing is said, and no rank writes beyond what its own call names."""
    n = 50 if rank.rank == 0 else 100_000
    x = np.full(n, 2, dtype=np.float32)
    y = np.full(n + 64, 5, dtype=np.float32)
    assert rank.all_reduce(x, y, count=n) == 0
    rank.pending(0.2)
    assert rank.async_error() == 0
    assert (y[n:] == 5).all()
    assert (x == 2).all()
    rank.must("ncclCommAbort", rank.comm)
    rank.synchronize()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)


def test_the_faithful_mode_says_nothing_and_stays_in_bounds(engine, calm):
    engine.set("mode", "faithful")
    nccl_ranks.run_threads(engine, 2, wrong_sizes)


# ---- peers that die


def survive(rank: Rank, waiting: bool) -> tuple[int, str, float]:
    """Rank 1 is killed in the second operation, or before it; rank 0 hears of it."""
    x = np.ones(1000, dtype=np.float32)
    assert rank.all_reduce(x) == 0
    rank.synchronize()
    begun = time.monotonic()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if waiting:
        assert rank.all_reduce(x) == 0
    error = rank.async_error(5.0)
    heard = time.monotonic() - begun
    text = last_error(rank.engine)
    if waiting:
        assert rank.pending(0.1)
    assert rank.all_reduce(x) == error
    rank.must("ncclCommAbort", rank.comm)
    rank.synchronize()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return error, text, heard


@pytest.mark.parametrize("waiting", [False, True])
def test_a_dead_peer_is_a_remote_error(engine, temper, waiting):
    found = nccl_ranks.run_processes(
        engine, 2, survive, waiting, environment=environment(temper), exits={1: -signal.SIGKILL}
    )
    error, text, heard = found[0]
    assert error == REMOTE
    assert text.startswith("rank 1 (pid ")
    assert text.endswith(") is gone")
    assert heard < GONE_LIMIT_S


def dies_at_init(rank: Rank) -> None:
    raise AssertionError("not reached")


def test_a_peer_that_dies_before_it_joins(engine, temper):
    """The others wait for it, as for one that is late; here the test ends them."""
    raw = bytes(nccl_ranks.unique_id(engine)).hex()
    task = {"ranks": 2, "id": raw, "arguments": []}
    given = environment(temper, PYNCCL_HOST_FAULTS="init:kill,rank=1")
    children = [
        nccl_ranks.Child(engine, {"rank": n, **task}, dies_at_init, given) for n in range(2)
    ]
    assert children[1].result()[0] == -signal.SIGKILL
    time.sleep(0.3)
    assert children[0].process.poll() is None
    children[0].process.kill()
    assert children[0].result()[0] == -signal.SIGKILL


# ---- operations that stick


def stick(rank: Rank) -> None:
    x = np.ones(4, dtype=np.float32)
    assert rank.all_reduce(x) == 0
    assert rank.pending(0.2)
    assert rank.async_error() == 0
    begun = time.monotonic()
    rank.must("ncclCommAbort", rank.comm)
    rank.synchronize()
    assert time.monotonic() - begun < 1
    assert (x == 1).all()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)


def test_a_stuck_operation_ends_with_abort(engine, calm):
    engine.set("faults", "op:stuck,name=ncclAllReduce,rank=0")
    nccl_ranks.run_threads(engine, 2, stick)


def blocked_in_the_call(rank: Rank) -> int:
    """In the gpulike temper the first call waits on the host; another thread ends it."""
    if rank.rank == 1:
        time.sleep(0.5)
        rank.abandon()
        return 0
    x = np.ones(4, dtype=np.float32)
    timer = threading.Timer(0.2, lambda: rank.must("ncclCommAbort", rank.comm))
    timer.start()
    begun = time.monotonic()
    code = rank.all_reduce(x)
    assert 0.15 < time.monotonic() - begun < 3
    timer.join()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return code


def test_first_contact_blocks_the_caller_and_can_be_aborted(engine):
    engine.set("temper", "gpulike")
    try:
        assert nccl_ranks.run_threads(engine, 2, blocked_in_the_call) == [INTERNAL, 0]
    finally:
        engine.set("temper", "quick")


def delayed(rank: Rank) -> float:
    """The input is read when the kernel begins, not when it was called."""
    x = np.ones(4, dtype=np.float32)
    begun = time.monotonic()
    assert rank.all_reduce(x) == 0
    time.sleep(0.05)
    x[:] = 3
    rank.synchronize()
    assert (x == 6).all()
    took = time.monotonic() - begun
    rank.finish()
    return took


def test_a_delayed_operation(engine, calm):
    engine.set("faults", "op:delay=200ms")
    for took in nccl_ranks.run_threads(engine, 2, delayed):
        assert 0.19 < took < 2


def remote(rank: Rank) -> None:
    x = np.ones(4, dtype=np.float32)
    assert rank.all_reduce(x) == 0
    if rank.rank == 0:
        assert rank.async_error(2.0) == REMOTE
    assert rank.pending(0.1)
    rank.must("ncclCommAbort", rank.comm)
    rank.synchronize()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)


def test_an_injected_remote_error(engine, calm):
    engine.set("faults", "op:remote=6,rank=0")
    nccl_ranks.run_threads(engine, 2, remote)


def poisoned(rank: Rank) -> None:
    """A faulting kernel kills the context, not the communicator."""
    x = np.ones(4, dtype=np.float32)
    address = None if rank.rank == 0 else x.ctypes.data
    assert (
        rank.engine.ncclAllReduce(
            address, x.ctypes.data, 4, FLOAT32, SUM, rank.comm, rank.stream
        )
        == 0
    )
    if rank.rank == 0:
        code = hostlib.NOT_READY
        while code == hostlib.NOT_READY:
            code = rank.engine.cuStreamQuery(rank.stream)
        assert code == hostlib.ILLEGAL_ADDRESS
    rank.must("ncclCommAbort", rank.comm)


def test_a_null_buffer_is_an_illegal_address(engine, temper):
    given = environment(temper, NCCL_RUNTIME_CONNECT="0")
    nccl_ranks.run_processes(engine, 2, poisoned, environment=given)


def call_fails(rank: Rank) -> None:
    x = np.ones(4, dtype=np.float32)
    codes = [rank.all_reduce(x) for _ in range(3)]
    assert codes == [0, SYSTEM, 0]
    rank.synchronize()
    rank.finish()


def test_the_kth_call_fails(engine, temper):
    given = environment(temper, PYNCCL_HOST_FAULTS="call:fail=2,name=ncclAllReduce,call=2")
    nccl_ranks.run_processes(engine, 2, call_fails, environment=given)


def in_progress(rank: Rank) -> None:
    code, x = ctypes.c_int(), np.ones(4, dtype=np.float32)
    assert rank.engine.ncclCommFinalize(rank.comm) == IN_PROGRESS
    states = []
    for _ in range(5):
        rank.must("ncclCommGetAsyncError", rank.comm, ctypes.byref(code))
        states.append(code.value)
        if code.value:
            assert rank.all_reduce(x) == ARGUMENT or len(states) == 3
    assert states == [IN_PROGRESS] * 3 + [0] * 2
    rank.must("ncclCommDestroy", rank.comm)
    rank.engine.must("cuStreamDestroy_v2", rank.stream)


def test_in_progress_for_some_polls(engine, temper):
    given = environment(temper, PYNCCL_HOST_FAULTS="finalize:in_progress=3")
    nccl_ranks.run_processes(engine, 1, in_progress, environment=given)


def abort_sticks(rank: Rank) -> float:
    begun = time.monotonic()
    rank.abandon()
    return time.monotonic() - begun


def test_a_stuck_abort(engine, calm):
    engine.set("faults", "abort:stuck=300ms,rank=1")
    quick, slow = nccl_ranks.run_threads(engine, 2, abort_sticks)
    assert slow > 0.29
    assert quick < slow - 0.1


def pinned(rank: Rank) -> int:
    rank.finish()
    return len(os.sched_getaffinity(0))


def test_init_narrows_the_affinity(engine, temper):
    if len(os.sched_getaffinity(0)) > 1:
        given = environment(temper, PYNCCL_HOST_FAULTS="init:affinity")
        assert nccl_ranks.run_processes(engine, 1, pinned, environment=given) == [1]
    assert nccl_ranks.run_processes(engine, 1, pinned) == [len(os.sched_getaffinity(0))]
