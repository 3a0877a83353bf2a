"""The misuse detector: each rule of NCCL's that it watches is broken once, and once kept."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time

import nccl_ranks
import numpy as np
import pytest
from nccl_ranks import ARGUMENT, Rank


@pytest.fixture
def reports(engine):
    """Take what the detector has reported; it is on."""
    engine.set("misuse", "report")
    engine.misuse()
    return engine.misuse


def reduce(rank: Rank) -> int:
    x = np.ones(4, dtype=np.float32)
    code = rank.all_reduce(x)
    rank.synchronize()
    return code


@contextlib.contextmanager
def another_thread_splits(rank: Rank):
    """For the length of the block another thread is inside a call on the communicator."""

    def split() -> None:
        child = ctypes.c_void_p()
        with nccl_ranks.on_device(rank.engine, rank.device):
            rank.engine.ncclCommSplit(rank.comm, 0, 0, ctypes.byref(child), None)
            rank.engine.ncclCommAbort(child)

    rank.engine.set("faults", "init:delay=300ms,name=ncclCommSplit")
    thread = threading.Thread(target=split)
    thread.start()
    time.sleep(0.1)
    try:
        yield
    finally:
        thread.join()


@pytest.mark.misuse
def test_two_threads_in_one_communicator(engine, temper, reports):
    def body(rank: Rank) -> None:
        with another_thread_splits(rank):
            assert reduce(rank) == 0
        rank.finish()

    nccl_ranks.run_threads(engine, 1, body)
    (told,) = reports()
    assert told.startswith("ncclAllReduce: thread ")
    assert "in a call on the communicator of rank 0" in told
    assert "enters another" in told


@pytest.mark.misuse
def test_the_end_of_a_group_is_inside_all_that_are_in_it(engine, temper, reports):
    def body(rank: Rank) -> None:
        x = np.ones(4, dtype=np.float32)
        rank.must("ncclGroupStart")
        reduced = rank.all_reduce(x)
        with another_thread_splits(rank):
            rank.must("ncclGroupEnd")
        rank.synchronize()
        assert reduced == 0
        rank.finish()

    nccl_ranks.run_threads(engine, 2, body)
    assert any(told.startswith("ncclGroupEnd: thread ") for told in reports())


def test_what_may_come_beside_another_threads_call(engine, temper, reports):
    def body(rank: Rank) -> None:
        with another_thread_splits(rank):
            assert rank.async_error() == 0
            count = ctypes.c_int()
            rank.must("ncclCommCount", rank.comm, ctypes.byref(count))
            rank.must("ncclCommAbort", rank.comm)
        rank.engine.must("cuStreamDestroy_v2", rank.stream)

    nccl_ranks.run_threads(engine, 1, body)
    assert reports() == []


@pytest.mark.misuse
@pytest.mark.parametrize("end", ["ncclCommDestroy", "ncclCommAbort"])
@pytest.mark.parametrize("late", ["ncclCommDestroy", "ncclCommAbort", "ncclCommFinalize"])
def test_use_after_the_end(engine, temper, reports, end, late):
    def body(rank: Rank) -> None:
        rank.must(end, rank.comm)
        assert getattr(engine, late)(rank.comm) == ARGUMENT
        assert reduce(rank) == ARGUMENT
        engine.must("cuStreamDestroy_v2", rank.stream)

    nccl_ranks.run_threads(engine, 1, body)
    first, second = reports()
    assert first.startswith(f"{late}: the communicator ")
    assert second.startswith("ncclAllReduce: the communicator ")
    assert first.endswith("was destroyed or aborted before")


@pytest.mark.misuse
def test_destroyed_twice_in_one_group(engine, temper, reports):
    def body(rank: Rank) -> None:
        rank.must("ncclGroupStart")
        rank.must("ncclCommDestroy", rank.comm)
        assert engine.ncclCommDestroy(rank.comm) == ARGUMENT
        engine.ncclGroupEnd()
        engine.must("cuStreamDestroy_v2", rank.stream)
        rank.must("ncclCommAbort", rank.comm)

    nccl_ranks.run_threads(engine, 1, body)
    assert [told.split(" is ")[-1] for told in reports()] == ["on its way out already"]


@pytest.mark.misuse
@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "grouped"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("device", [2, None])
def test_an_operation_on_a_wrong_device(engine, temper, reports, device, ranks, grouped):
    """A group goes to the right device by itself, but where there is one rank."""

    def body(rank: Rank) -> None:
        x = np.ones(4, dtype=np.float32)
        on = nccl_ranks.on_device(engine, 2) if device else contextlib.nullcontext()
        engine.must("cuCtxSetCurrent", None)
        with on:
            if grouped:
                rank.must("ncclGroupStart")
            assert rank.all_reduce(x) in (0, nccl_ranks.CUDA)
            if grouped:
                engine.ncclGroupEnd()
        with nccl_ranks.on_device(engine, rank.device):
            rank.synchronize()
            rank.finish()

    nccl_ranks.run_threads(engine, ranks, body)
    told = [
        f"ncclAllReduce: the thread's device is {device or -1}, the communicator of rank "
        f"{rank} is on device {rank}"
        for rank in range(ranks)
    ]
    assert sorted(reports()) == ([] if grouped and ranks > 1 else told)


@pytest.mark.misuse
@pytest.mark.parametrize("depth", [1, 2])
def test_a_thread_that_ends_inside_a_group(engine, reports, depth):
    thread = threading.Thread(target=lambda: [engine.ncclGroupStart() for _ in range(depth)])
    thread.start()
    thread.join()
    for _ in range(200):  # Python lets go of a thread a little before its end
        if told := reports():
            break
        time.sleep(0.01)
    assert told == [f"a thread has ended inside a group: its depth is {depth}"]


def test_right_use_is_not_reported(engine, temper, reports):
    def body(rank: Rank) -> None:
        x = np.ones(4, dtype=np.float32)
        rank.must("ncclGroupStart")
        assert rank.all_reduce(x) == 0
        rank.must("ncclGroupEnd")
        child = rank.split(0, rank.rank)
        assert reduce(rank) == 0
        rank.must("ncclCommDestroy", child)
        rank.finish()

    nccl_ranks.run_threads(engine, 3, body)
    assert reports() == []


def test_a_process_can_be_ended_by_its_first_misuse(engine):
    library = str(engine.library._name)
    program = f"""
import ctypes, threading
library = ctypes.CDLL({library!r})
library.ncclGroupStart()
threading.Thread(target=library.ncclGroupStart).start()
threading.Event().wait(10)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYNCCL_HOST_MISUSE": "abort"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == -6, done.stderr
    assert "pynccl host engine: misuse: a thread has ended inside a group" in done.stderr


@pytest.mark.misuse
def test_all_are_counted_and_the_first_are_kept(engine, reports):
    threads = [threading.Thread(target=engine.ncclGroupStart) for _ in range(20)]
    text = ctypes.create_string_buffer(8192)
    for thread in threads:
        thread.start()
        thread.join()
    time.sleep(0.1)
    assert engine.library.pn_host_misuse_take(text, len(text)) == 20
    assert len(text.value.splitlines()) == 16
    assert reports() == []


def test_an_unknown_word_is_refused(engine):
    with pytest.raises(ValueError, match="misuse"):
        engine.set("misuse", "shout")
