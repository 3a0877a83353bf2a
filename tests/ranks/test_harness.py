"""The harness that runs rank functions (support.ranks), with planted faults.

The rank functions here are bare: no communicator takes part.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.ranks import Place, RanksFailed, run_processes, run_threads


def processes(*args, **options):
    return run_processes(*args, bare=True, **options)


def shared(*args, **options):
    return run_threads(*args, bare=True, **options)


def loops(*args, **options):
    return run_threads(*args, bare=True, loops=True, **options)


everywhere = pytest.mark.parametrize("run", [processes, shared, loops])


async def introduce(place: Place, *arguments):
    await asyncio.sleep(0)
    thread = threading.current_thread() is threading.main_thread()
    temper = os.environ["PYNCCL_HOST_TEMPER"]
    loop = type(asyncio.get_running_loop()).__module__
    return [place.rank, place.size, place.device, os.getpid(), thread, temper, loop, *arguments]


async def fail_on_one(place: Place):
    if place.rank == 1:
        raise ValueError("the fault of rank one")
    await asyncio.sleep(600)


async def hang_in_native_code(place: Place):
    print(f"rank {place.rank} says this before it hangs", flush=True)
    if place.rank == 0:
        time.sleep(600)  # noqa: ASYNC251 (it is the fault)


async def hang_in_the_loop(place: Place):
    await asyncio.Event().wait()


async def leave_by_the_window(place: Place):
    if place.rank == 1:
        os._exit(0)


async def die(place: Place):
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


async def leave_a_child(place: Place):
    idle = [sys.executable, "-c", "import time; time.sleep(600)"]
    return subprocess.Popen(idle).pid  # noqa: ASYNC220


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@everywhere
def test_values_come_back_in_rank_order(run):
    values = run(3, introduce, temper="gpulike", arguments=["text", 1.5])
    for rank, value in enumerate(values):
        assert value[:3] == [rank, 3, f"cpu:{rank}"]
        assert value[4] == (run is not loops)
        assert value[5:] == ["gpulike", "asyncio.unix_events", "text", 1.5]
    assert len({value[3] for value in values}) == (3 if run is processes else 1)
    assert os.getpid() not in {value[3] for value in values}


def test_a_function_may_be_named():
    assert processes(1, f"{__name__}:introduce")[0][:2] == [0, 1]


def test_only_what_a_new_interpreter_can_find_is_taken():
    async def inner(place):
        return place.rank

    for function in (inner, is_running):
        with pytest.raises(TypeError, match="top level"):
            processes(1, function)


@everywhere
def test_uvloop(run):
    values = run(2, introduce, env={"PYNCCL_TEST_LOOP": "uvloop"})
    assert [value[6] for value in values] == ["uvloop"] * 2


@everywhere
def test_a_failure_is_forwarded_and_the_others_do_not_stay(run, monkeypatch):
    monkeypatch.setattr("support.ranks.GRACE_S", 0.2)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run(3, fail_on_one)
    text = str(caught.value)
    assert "ValueError: the fault of rank one" in text
    assert "in fail_on_one" in text
    assert "asyncio.sleep(600)" in text  # where the others were
    assert time.monotonic() - start < 20


@everywhere
def test_the_deadline_ends_a_rank_that_blocks_its_thread(run):
    with pytest.raises(RanksFailed) as caught:
        run(2, hang_in_native_code, timeout=1.5)
    text = str(caught.value)
    assert "not done after 1.5 s" in text
    assert "rank 0 says this before it hangs" in text
    assert "in hang_in_native_code" in text


@pytest.mark.parametrize("run", [processes, shared])
def test_the_deadline_ends_a_rank_that_awaits(run):
    with pytest.raises(RanksFailed) as caught:
        run(2, hang_in_the_loop, timeout=1.5)
    assert "await asyncio.Event().wait()" in str(caught.value)


@pytest.mark.parametrize("run", [processes, shared])
def test_an_end_without_a_value_is_a_failure(run):
    with pytest.raises(RanksFailed, match="ended before the function did"):
        run(2, leave_by_the_window)


def test_a_death_can_be_expected():
    assert processes(2, die, exits={1: -signal.SIGKILL}) == ["alive", None]
    with pytest.raises(RanksFailed, match="exit status -9"):
        processes(2, die)
    with pytest.raises(RanksFailed, match="exit status 0, -9 expected"):
        processes(2, introduce, exits={1: -signal.SIGKILL})


def test_what_a_rank_started_ends_with_it():
    [pid] = processes(1, leave_a_child)
    limit = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not is_running(pid)
