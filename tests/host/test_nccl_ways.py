"""Large data between processes, by every way: slots, past the caches, copies by the kernel."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import nccl_ranks
import numpy as np
import pytest
from hostlib import NOT_READY
from nccl_ranks import CUDA, REMOTE, Rank
from test_nccl_collectives import FLOAT32, OPERATIONS, Case
from test_nccl_direct import COUNT, MANY, Registered, allocate, every_operation, staged

if TYPE_CHECKING:
    from support.reference import Array

WAYS = ["cached", "past", "attach"]


def run(engine, ranks, body, temper, *arguments, way="measured"):
    environment = {"PYNCCL_HOST_TEMPER": temper, "PYNCCL_HOST_WAY": way}
    return nccl_ranks.run_processes(engine, ranks, body, *arguments, environment=environment)


def everything(rank: Rank) -> int:
    return every_operation(rank, Case)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_way_gives_the_same_results(engine, temper, way, ranks):
    found = run(engine, ranks, everything, temper, way=way)
    assert all((count == 0) == (way == "attach") for count in found)


def repeated(rank: Rank) -> list[bool]:
    """Many operations of one kind; of each, whether it was staged."""
    found = []
    for _ in range(30):
        before = staged(rank)
        Case(rank, "all_gather", FLOAT32, 200_003, "sum", False).check()
        found.append(staged(rank) != before)
    rank.finish()
    return found


def test_the_way_is_chosen_by_trying_and_by_all_alike(engine, temper):
    first, *others = run(engine, 3, repeated, temper)
    assert set(first) == {False, True}
    assert all(other == first for other in others)


# ---- the benchmark's caller -----------------------------------------------------------------


def turns(rank: Rank) -> list[int]:
    """So many sums by the caller in C, and one that cannot be."""
    given, summed = np.full(2, rank.rank + 1, np.float32), np.zeros(2, np.float32)
    ends = [ctypes.c_void_p(array.ctypes.data) for array in (given, summed)]
    call = rank.engine.library.pn_host_turns
    call.restype = ctypes.c_int64
    stream = ctypes.c_void_p(rank.stream)
    found = [call(comm, stream, *ends, ctypes.c_size_t(2), 100) for comm in (rank.comm, None)]
    assert (summed == 3).all()
    rank.finish()
    return found


def test_the_caller_in_c_sums_or_says_that_it_cannot(engine, temper):
    for taken, refused in run(engine, 2, turns, temper):
        assert taken > 0
        assert refused == -1


# ---- ranks that may not attach -------------------------------------------------------------


def forbid_attaching() -> None:
    """Have the kernel refuse it to this process, as a container's profile does."""
    numbers = {"x86_64": (310, 311), "aarch64": (270, 271)}[os.uname().machine]
    load, equal, answer, allow, refuse = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000 | 1
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (load, 0, 0, 0),
            (equal, 1, 0, numbers[0]),
            (equal, 0, 1, numbers[1]),
            (answer, 0, 0, refuse),
            (answer, 0, 0, allow),
        )
    )
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 5, ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, header) == 0  # a filter of system calls


def forbidden(rank: Rank) -> bool:
    """Rank 1 may not attach; whether any way was found that stages nothing."""
    if rank.rank == 1:
        forbid_attaching()
    before = staged(rank)
    for _ in range(12):
        Case(rank, "broadcast", FLOAT32, 200_003, "sum", False).check()
        Case(rank, "all_reduce", FLOAT32, 200_003, "sum", True).check()
        exchange(rank, 100_003)
    found = staged(rank) - before
    rank.finish()
    return found > 0


@pytest.mark.parametrize("way", ["measured", "attach"])
def test_ranks_do_without_where_one_may_not_attach(engine, temper, way):
    assert run(engine, 3, forbidden, temper, way=way) == [True] * 3


def differing(rank: Rank) -> None:
    """Ranks that were told different ways."""
    assert rank.engine.library.pn_host_set(b"way", WAYS[rank.rank].encode()) == 0
    for operation in OPERATIONS:
        Case(rank, operation, FLOAT32, COUNT, "sum", False).check()
        exchange(rank, 100_003)
    rank.finish()


def test_ranks_need_not_agree_on_the_way(engine, temper):
    run(engine, 3, differing, temper)


# ---- messages ------------------------------------------------------------------------------


def exchange(rank: Rank, count: int, registered: bool = False) -> None:
    """Everyone sends to everyone, itself included, in one group."""
    everybody = range(rank.ranks)
    sent: list[Array] = []
    pointers = []
    for peer in everybody:
        pattern = np.arange(count, dtype=np.float32) + 1000 * rank.rank + peer
        if registered:
            pointer, memory = allocate(rank.engine, pattern.nbytes)
            pointers.append(pointer)
            memory.view(np.float32)[:] = pattern
            pattern = memory.view(np.float32)
        sent.append(pattern)
    received = [np.zeros(count, np.float32) for _ in everybody]
    rank.must("ncclGroupStart")
    for peer in everybody:
        tail = (ctypes.c_size_t(count), FLOAT32, peer, rank.comm, rank.stream)
        rank.must("ncclSend", ctypes.c_void_p(sent[peer].ctypes.data), *tail)
        rank.must("ncclRecv", ctypes.c_void_p(received[peer].ctypes.data), *tail)
    rank.must("ncclGroupEnd")
    rank.synchronize()
    for peer in everybody:
        wanted = np.arange(count, dtype=np.float32) + 1000 * peer + rank.rank
        assert (received[peer] == wanted).all()
    for pointer in pointers:
        rank.must("ncclMemFree", ctypes.c_void_p(pointer))


def messages(rank: Rank) -> None:
    for count in (1, 5_000, 100_003, 1_500_007):
        for registered in (False, True):
            exchange(rank, count, registered)
    rank.finish()


@pytest.mark.parametrize("way", [*WAYS, "measured"])
def test_messages_arrive_by_every_way(engine, temper, way):
    run(engine, 3, messages, temper, way=way)


def test_messages_between_threads_arrive(engine, temper):
    nccl_ranks.run_threads(engine, 3, messages)


def many_buffers(rank: Rank) -> None:
    """More buffers in one group than can be offered at a time, after the table was full."""
    for _ in range(2):
        count, buffers = 8_192, 70
        sent = [allocate(rank.engine, 4 * count) for _ in range(buffers)]
        for i, (_, memory) in enumerate(sent):
            memory.view(np.float32)[:] = 100 * rank.rank + i
        received = np.zeros((buffers, count), np.float32)
        peer = 1 - rank.rank
        tail = (ctypes.c_size_t(count), FLOAT32, peer, rank.comm, rank.stream)
        rank.must("ncclGroupStart")
        for pointer, _ in sent:
            rank.must("ncclSend", ctypes.c_void_p(pointer), *tail)
        for row in received:
            rank.must("ncclRecv", ctypes.c_void_p(row.ctypes.data), *tail)
        rank.must("ncclGroupEnd")
        rank.synchronize()
        assert (received == 100 * peer + np.arange(buffers)[:, None]).all()
        for pointer, _ in sent:
            rank.must("ncclMemFree", ctypes.c_void_p(pointer))
        Registered(rank, "all_reduce", FLOAT32, COUNT, "sum", False).check()
    rank.finish()


@pytest.mark.parametrize("way", ["cached", "measured"])
def test_a_group_may_have_more_buffers_than_can_be_offered(engine, temper, way):
    run(engine, 2, many_buffers, temper, way=way)


# ---- what goes wrong -----------------------------------------------------------------------


def mapped(nbytes: int) -> int:
    """Zeros of our own, which we may unmap when we like."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    read_write, private_anonymous = 3, 0x22
    length = ctypes.c_size_t(nbytes)
    address = libc.mmap(None, length, read_write, private_anonymous, -1, ctypes.c_long(0))
    ctypes.memset(address, 0, nbytes)
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    assert ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0


def meet(rank: Rank) -> None:
    """First contact is another matter."""
    small = np.ones(2, np.float32)
    assert rank.all_reduce(small) == 0
    rank.synchronize()


def wait_aside(rank: Rank) -> threading.Thread:
    waiter = threading.Thread(target=rank.engine.cuStreamSynchronize, args=(rank.stream,))
    waiter.start()
    return waiter


def no_memory(rank: Rank, board: str) -> int:
    """The root of a broadcast gives a buffer that nobody may read. What this rank is told."""
    at = ctypes.c_void_p(mapped(4 * MANY))
    count = ctypes.c_size_t(MANY)
    if rank.rank == 1:
        assert ctypes.CDLL(None).mprotect(at, ctypes.c_size_t(4 * MANY), 0) == 0
    rank.must("ncclBroadcast", at, at, count, FLOAT32, 1, rank.comm, rank.stream)
    waiter = wait_aside(rank)
    code = rank.async_error(10)
    Path(board, str(rank.rank)).touch()
    end = time.monotonic() + 10  # who aborts first keeps the other from its error
    while not Path(board, str(1 - rank.rank)).exists() and time.monotonic() < end:
        time.sleep(0.001)
    assert "ncclBroadcast" in nccl_ranks.last_error(rank.engine)
    rank.must("ncclCommAbort", rank.comm)
    waiter.join()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return code


def test_a_buffer_that_is_no_memory_is_an_error(engine, temper, tmp_path):
    assert run(engine, 2, no_memory, temper, str(tmp_path), way="attach") == [CUDA, CUDA]


def aborted(rank: Rank) -> None:
    """Rank 0 aborts in the middle, and unmaps at once what others may be reading or writing."""
    nbytes = 64 << 20
    address = mapped(nbytes)
    at = ctypes.c_void_p(address)
    meet(rank)
    count = ctypes.c_size_t(nbytes // 4)
    rank.must("ncclAllReduce", at, at, count, FLOAT32, 0, rank.comm, rank.stream)
    waiter = wait_aside(rank)
    if rank.rank == 1:
        waiter.join(0.3)
    else:
        time.sleep(0.004)
    rank.must("ncclCommAbort", rank.comm)
    unmap(address, nbytes)
    waiter.join()
    rank.engine.must("cuStreamDestroy_v2", rank.stream)


@pytest.mark.parametrize("way", WAYS)
def test_an_abort_lets_nobody_near_its_buffers(engine, temper, way):
    run(engine, 2, aborted, temper, way=way)


def killed(rank: Rank, delay: float) -> int:
    """Rank 1 is killed while large data move; what rank 0 is told."""
    meet(rank)
    if rank.rank == 1:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    array = np.ones(8 << 20, np.float32)
    at, count = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.size)
    code, end = 0, time.monotonic() + 20
    while code == 0 and time.monotonic() < end:
        call = (at, at, count, FLOAT32, 2, rank.comm, rank.stream)
        code = rank.engine.ncclAllReduce(*call)  # it may be told here already
        while rank.engine.cuStreamQuery(rank.stream) == NOT_READY and code == 0:
            code = rank.async_error()
    rank.must("ncclCommAbort", rank.comm)
    rank.engine.must("cuStreamDestroy_v2", rank.stream)
    return code


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_killed_in_the_middle_is_a_remote_error(engine, temper, way):
    environment = {"PYNCCL_HOST_TEMPER": temper, "PYNCCL_HOST_WAY": way}
    for delay in (0.03, 0.05, 0.08):
        found = nccl_ranks.run_processes(
            engine, 2, killed, delay, environment=environment, exits={1: -signal.SIGKILL}
        )
        assert found[0] == REMOTE
