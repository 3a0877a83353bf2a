"""Windows and one-sided operations."""

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
from nccl_ranks import ARGUMENT, CUDA, INTERNAL, REMOTE, USAGE, Rank, last_error
from structs import Desc, descriptors

UINT8, INT32, SUM, SYMMETRIC = 1, 2, 0, 1
PAGE = 4096
WINDOW = 64 * PAGE


class Window:
    """A window over memory of ncclMemAlloc, registered by all ranks in one call."""

    def __init__(self, rank: Rank, nbytes: int = WINDOW, flags: int = SYMMETRIC) -> None:
        self.rank = rank
        self.memory = ctypes.c_void_p()
        self.handle = ctypes.c_void_p()
        rank.must("ncclMemAlloc", ctypes.byref(self.memory), nbytes)
        rank.must(
            "ncclCommWindowRegister",
            rank.comm, self.memory, nbytes, ctypes.byref(self.handle), flags,
        )  # fmt: skip
        self.data = (ctypes.c_ubyte * nbytes).from_address(self.memory.value or 0)
        self.address = self.memory.value or 0

    def close(self) -> None:
        self.rank.must("ncclCommWindowDeregister", self.rank.comm, self.handle)
        self.rank.must("ncclMemFree", self.memory)

    def put(
        self, source: int, nbytes: int, peer: int, offset: int, sig: int = 0, ctx: int = 0
    ) -> int:
        code: int = self.rank.engine.ncclPutSignal(
            source, nbytes, UINT8, peer, self.handle, offset, sig, ctx, 0,
            self.rank.comm, self.rank.stream,
        )  # fmt: skip
        return code


def give(rank: Rank, peer: int, index: int = 0, context: int = 0) -> int:
    code: int = rank.engine.ncclSignal(peer, index, context, 0, rank.comm, rank.stream)
    return code


def wait(rank: Rank, *descs: tuple[int, int, int, int]) -> int:
    """Call ncclWaitSignal for (count, peer, index, context) each."""
    many = descriptors(*descs)
    code: int = rank.engine.ncclWaitSignal(len(descs), many, rank.comm, rank.stream)
    ctypes.memset(many, 0, ctypes.sizeof(many))  # the call has copied them
    return code


def ring(rank: Rank) -> int:
    """Put a pattern to the next rank, three times over, and read what the one before put."""
    window = Window(rank)
    after, before = (rank.rank + 1) % rank.ranks, (rank.rank - 1) % rank.ranks
    for turn in range(3):
        for i in range(PAGE):
            window.data[i] = (rank.rank * 7 + turn + i) % 251
        assert window.put(window.address, PAGE, after, (2 + turn) * PAGE) == 0
        assert wait(rank, (1, before, 0, 0)) == 0
        rank.synchronize()
        got = window.data[(2 + turn) * PAGE : (3 + turn) * PAGE]
        assert got == [(before * 7 + turn + i) % 251 for i in range(PAGE)]
    window.close()
    rank.finish()
    return rank.rank


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_puts_between_threads(engine, temper, ranks):
    before = engine.live()["segments"]
    assert nccl_ranks.run_threads(engine, ranks, ring) == list(range(ranks))
    assert engine.live()["segments"] <= before  # fewer: what other tests offered was withdrawn


def test_puts_between_processes(engine, temper):
    values = nccl_ranks.run_processes(
        engine, 3, ring, environment={"PYNCCL_HOST_TEMPER": temper}
    )
    assert values == [0, 1, 2]


def signals(rank: Rank) -> None:
    """A wait takes as many signals as it asks for; those that came before it count."""
    window = Window(rank)
    peer = 1 - rank.rank
    if rank.rank == 0:
        for _ in range(5):
            assert give(rank, peer) == 0
        rank.synchronize()
        time.sleep(0.2)
        assert give(rank, peer) == 0
    else:
        assert wait(rank, (3, peer, 0, 0)) == 0
        rank.synchronize()
        assert wait(rank, (3, peer, 0, 0)) == 0
        assert rank.pending(0.05)
        rank.synchronize()
    window.close()
    rank.finish()


def test_signals_are_counted(engine, temper):
    nccl_ranks.run_threads(engine, 2, signals)


def contexts(rank: Rank) -> None:
    """A signal of another index or context is another signal; one wait may ask for several."""
    window = Window(rank)
    peer = 1 - rank.rank
    for index, context in ((1, 0), (0, 1), (0, 1)):
        assert give(rank, peer, index, context) == 0
    assert wait(rank, (1, peer, 1, 0), (2, peer, 0, 1)) == 0
    rank.synchronize()
    assert wait(rank, (1, peer, 0, 0)) == 0
    assert rank.pending(0.05)
    rank.must("ncclCommAbort", rank.comm)
    rank.synchronize()
    assert rank.engine.cuStreamDestroy_v2(rank.stream) == 0
    rank.must("ncclMemFree", window.memory)


def test_indices_and_contexts_are_apart(engine, temper):
    settings = {"numRmaCtx": 2, "numRmaSig": 2}
    nccl_ranks.run_threads(engine, 2, contexts, settings=settings)


def grouped(rank: Rank) -> None:
    """In a group the order of the calls stays; a put of nothing still signals."""
    window = Window(rank)
    peer = 1 - rank.rank
    window.data[0] = 40 + rank.rank
    rank.must("ncclGroupStart")
    assert window.put(window.address, 1, peer, 100) == 0
    assert window.put(window.address, 0, peer, 0) == 0
    assert wait(rank, (2, peer, 0, 0)) == 0
    assert window.put(window.address + 100, 1, peer, 200) == 0  # back to its owner
    assert wait(rank, (1, peer, 0, 0)) == 0
    rank.must("ncclGroupEnd")
    rank.synchronize()
    assert (window.data[100], window.data[200]) == (40 + peer, 40 + rank.rank)
    window.close()
    rank.finish()


def test_operations_of_a_group_are_in_order(engine, temper):
    nccl_ranks.run_threads(engine, 2, grouped)


def refused(rank: Rank) -> None:
    """Every bad argument has NCCL's code, and the next correct call works."""
    engine = rank.engine
    assert give(rank, 0) == USAGE
    assert "rmaEagerInit" in last_error(engine)
    assert wait(rank, (1, 0, 0, 0)) == USAGE
    window = Window(rank)
    plain = Window(rank, flags=0)
    a, w = window.address, window.handle
    cases = (
        ((a, 1, UINT8, 9, w, 0, 0, 0, 0), ARGUMENT),  # peer
        ((a, 1, UINT8, -1, w, 0, 0, 0, 0), ARGUMENT),
        ((a, 1, 12, 0, w, 0, 0, 0, 0), ARGUMENT),  # type
        ((a, 1, UINT8, 0, w, 0, 1, 0, 0), ARGUMENT),  # signal index
        ((a, 1, UINT8, 0, w, 0, 0, 1, 0), ARGUMENT),  # context
        ((a, 1, UINT8, 0, w, 0, 0, -1, 0), ARGUMENT),
        ((a, 1, UINT8, 0, w, 0, 0, 0, 1), ARGUMENT),  # flags
        ((a, 1, UINT8, 0, None, 0, 0, 0, 0), ARGUMENT),  # window
        ((None, 1, UINT8, 0, w, 0, 0, 0, 0), ARGUMENT),  # source
        ((a - PAGE, 1, UINT8, 0, w, 0, 0, 0, 0), ARGUMENT),  # in no window
        ((plain.address, 1, UINT8, 0, w, 0, 0, 0, 0), ARGUMENT),  # in none that is symmetric
        ((a, 1, UINT8, 0, plain.memory, 0, 0, 0, 0), INTERNAL),  # no window
    )
    for arguments, code in cases:
        assert engine.ncclPutSignal(*arguments, rank.comm, rank.stream) == code, arguments
    for descs in (((0, 0, 0, 0),), ((-1, 0, 0, 0),), ((1, 0, 1, 0),), ((1, 0, 0, 1),)):
        assert wait(rank, *descs) == ARGUMENT, descs
    assert engine.ncclWaitSignal(0, (Desc * 1)(), rank.comm, rank.stream) == ARGUMENT
    assert engine.ncclWaitSignal(1, None, rank.comm, rank.stream) == ARGUMENT
    assert engine.ncclGroupEnd() == USAGE
    engine.ncclGroupStart()
    assert give(rank, 9) == ARGUMENT
    assert engine.ncclGroupEnd() == ARGUMENT
    assert window.put(a, 1, rank.rank, 5) == 0
    assert wait(rank, (1, rank.rank, 0, 0)) == 0
    rank.synchronize()
    plain.close()
    window.close()
    rank.finish()


def test_bad_arguments_of_operations(engine, temper):
    nccl_ranks.run_threads(engine, 2, refused)


def memory_refused(rank: Rank) -> None:
    """What is no memory for a window makes the call fail on all ranks, with reasons."""
    engine = rank.engine
    window = ctypes.c_void_p(77)
    register = engine.ncclCommWindowRegister
    memory = ctypes.c_void_p()
    rank.must("ncclMemAlloc", ctypes.byref(memory), 4 * PAGE)
    address = memory.value or 0
    ordinary = ctypes.create_string_buffer(PAGE)
    for pointer, size, code in (
        (None, PAGE, ARGUMENT),
        (address, 0, ARGUMENT),
        (ctypes.addressof(ordinary), PAGE, CUDA),
        (address + 512, PAGE, ARGUMENT),
        (address, 1 << 30, CUDA),
    ):
        window.value = 77
        assert register(rank.comm, pointer, size, ctypes.byref(window), 1) == code, pointer
        assert window.value is None
    assert register(rank.comm, address, PAGE, None, 1) == ARGUMENT
    # One rank's mistake is told to all.
    wrong = rank.rank == 1
    code = register(
        rank.comm, address + (512 if wrong else PAGE), PAGE, ctypes.byref(window), 1
    )
    assert code == (ARGUMENT if wrong else REMOTE)
    assert register(rank.comm, address + PAGE, PAGE, ctypes.byref(window), 1) == 0
    pointer = ctypes.c_void_p()
    assert engine.ncclWinGetUserPtr(rank.comm, window, ctypes.byref(pointer)) == 0
    assert pointer.value == address + PAGE
    assert engine.ncclWinGetUserPtr(rank.comm, window, None) == ARGUMENT
    assert engine.ncclWinGetUserPtr(rank.comm, None, ctypes.byref(pointer)) == ARGUMENT
    assert engine.ncclWinGetUserPtr(rank.comm, memory, ctypes.byref(pointer)) == INTERNAL
    assert engine.ncclCommWindowDeregister(rank.comm, None) == 0
    assert engine.ncclCommWindowDeregister(rank.comm, memory) == INTERNAL
    assert engine.ncclCommWindowDeregister(rank.comm, window) == 0
    assert engine.ncclCommWindowDeregister(rank.comm, window) == INTERNAL
    rank.must("ncclMemFree", memory)
    rank.finish()


def test_which_memory_can_be_a_window(engine, temper):
    nccl_ranks.run_threads(engine, 2, memory_refused)


def one_fails(rank: Rank) -> None:
    """In the faithful mode the others wait for the rank that failed, until they are aborted."""
    engine = rank.engine
    memory, window = ctypes.c_void_p(), ctypes.c_void_p()
    rank.must("ncclMemAlloc", ctypes.byref(memory), PAGE)
    address = (memory.value or 0) + (512 if rank.rank == 1 else 0)
    results: list[int] = []

    def register() -> None:
        results.append(
            engine.ncclCommWindowRegister(rank.comm, address, PAGE, ctypes.byref(window), 1)
        )

    thread = threading.Thread(target=register)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() == (rank.rank == 0)
    rank.abandon()
    thread.join(10)
    assert (results == [ARGUMENT]) == (rank.rank == 1)
    assert results[0] != 0
    rank.must("ncclMemFree", memory)


def test_a_failed_rank_is_waited_for_in_the_faithful_mode(engine, temper):
    engine.set("mode", "faithful")
    try:
        nccl_ranks.run_threads(engine, 2, one_fails)
    finally:
        engine.set("mode", "strict")


def in_a_group(rank: Rank) -> None:
    """In a group windows are there at its end, and made in the order of the calls."""
    memory = ctypes.c_void_p()
    rank.must("ncclMemAlloc", ctypes.byref(memory), 4 * PAGE)
    windows = [ctypes.c_void_p(1) for _ in range(3)]
    rank.must("ncclGroupStart")
    for i, window in enumerate(windows):
        rank.must(
            "ncclCommWindowRegister",
            rank.comm, (memory.value or 0) + i * PAGE, PAGE, ctypes.byref(window), SYMMETRIC,
        )  # fmt: skip
        assert window.value is None
    rank.must("ncclGroupEnd")
    pointer = ctypes.c_void_p()
    for i, window in enumerate(windows):
        rank.must("ncclWinGetUserPtr", rank.comm, window, ctypes.byref(pointer))
        assert pointer.value == (memory.value or 0) + i * PAGE
    rank.must("ncclMemFree", memory)
    rank.finish()  # windows that are left go with the communicator


def test_windows_of_a_group(engine, temper):
    nccl_ranks.run_threads(engine, 3, in_a_group)


def without_windows(rank: Rank) -> None:
    """A system without windows says so by giving none."""
    engine = rank.engine
    memory, window = ctypes.c_void_p(), ctypes.c_void_p(1)
    rank.must("ncclMemAlloc", ctypes.byref(memory), PAGE)
    rank.must("ncclCommWindowRegister", rank.comm, memory, PAGE, ctypes.byref(window), 1)
    assert window.value is None
    window.value = 1
    rank.must("ncclWinGetUserPtr", rank.comm, memory, ctypes.byref(window))
    assert window.value is None
    assert give(rank, 0) == ARGUMENT
    assert "switched off" in last_error(engine)
    rank.must("ncclMemFree", memory)
    rank.finish()


def test_a_system_without_windows(engine, temper):
    engine.set("windows", "0")
    try:
        nccl_ranks.run_threads(engine, 2, without_windows)
    finally:
        engine.set("windows", "1")


def eager(rank: Rank) -> None:
    peer = 1 - rank.rank
    assert give(rank, peer) == 0
    assert wait(rank, (1, peer, 0, 0)) == 0
    rank.synchronize()
    rank.finish()


def test_signals_from_the_beginning(engine, temper):
    nccl_ranks.run_threads(engine, 2, eager, settings={"rmaEagerInit": 1})


def no_contexts(rank: Rank) -> None:
    window = Window(rank)
    assert window.put(window.address, 1, 0, 0) == ARGUMENT
    assert "numRmaCtx" in last_error(rank.engine)
    window.close()
    rank.finish()


def test_no_contexts_means_no_operations(engine, temper):
    nccl_ranks.run_threads(engine, 2, no_contexts, settings={"numRmaCtx": 0})


def beside(rank: Rank) -> None:
    """A stream that waits for a signal does not keep other communicators from the device."""
    window, data, peer = Window(rank), np.ones(1, dtype=np.int32), 1 - rank.rank
    child, other = rank.split(0), rank.engine.stream()
    if rank.rank == 0:
        assert wait(rank, (1, peer, 0, 0)) == 0
        time.sleep(0.05)
    rank.must(
        "ncclAllReduce", data.ctypes.data, data.ctypes.data, 1, INT32, SUM, child, other
    )  # fmt: skip
    rank.engine.must("cuStreamSynchronize", other)
    assert data[0] == 2
    if rank.rank == 1:
        assert give(rank, peer) == 0
    rank.synchronize()
    rank.engine.must("cuStreamDestroy_v2", other)
    rank.must("ncclCommFinalize", child)
    rank.must("ncclCommDestroy", child)
    window.close()
    rank.finish()


def test_a_waiting_stream_takes_no_place_on_the_device(engine, temper):
    nccl_ranks.run_threads(engine, 2, beside)


def abandoned(rank: Rank) -> None:
    """A wait for a signal that never comes ends with an abort."""
    Window(rank)
    assert wait(rank, (1, 1 - rank.rank, 0, 0)) == 0
    assert rank.pending(0.05)
    rank.abandon()


def test_an_abort_ends_a_wait(engine, temper):
    nccl_ranks.run_threads(engine, 2, abandoned)


def killed(rank: Rank) -> int:
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    memory, window = ctypes.c_void_p(), ctypes.c_void_p()
    rank.must("ncclMemAlloc", ctypes.byref(memory), PAGE)
    begin = time.monotonic()
    code: int = rank.engine.ncclCommWindowRegister(
        rank.comm, memory, PAGE, ctypes.byref(window), SYMMETRIC
    )
    assert time.monotonic() - begin < 5
    rank.abandon()
    return code


def test_a_dead_peer_fails_the_registration(engine):
    values = nccl_ranks.run_processes(engine, 2, killed, exits={1: -signal.SIGKILL})
    assert values[0] == REMOTE


def past_the_end(rank: Rank) -> int:
    """A put past the end of the window is an illegal address, when it runs."""
    window = Window(rank, PAGE)
    assert window.put(window.address, PAGE, rank.rank, 1) == 0
    code: int = rank.engine.cuStreamSynchronize(rank.stream)
    return code


def test_a_put_past_the_end(engine):
    values = nccl_ranks.run_processes(engine, 1, past_the_end)
    assert values == [hostlib.ILLEGAL_ADDRESS]
