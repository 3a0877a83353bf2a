"""What the two tempers promise: quick wakes nobody, gpulike is as strict as a GPU."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path

import hostlib
import pytest
from hostlib import NOT_READY, SUCCESS
from test_driver import run_alone
from test_driver_streams import Log, becomes


@pytest.fixture
def quick(engine, context, temper):
    if temper != "quick":
        engine.set("temper", "quick")
    return engine


@pytest.fixture
def gpulike(engine, context):
    engine.set("temper", "gpulike")
    return engine


def switches():
    """Voluntary and other context switches of all threads of this process but this one."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != threading.get_native_id():
            lines = (task / "status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return total


# ---- quick


def test_quick_small_work_needs_no_thread():
    done = run_alone("""
        import os
        before = len(os.listdir("/proc/self/task"))
        engine.must("cuInit", 0)
        engine.must("cuCtxSetCurrent", engine.made("cuDevicePrimaryCtxRetain", 0))
        stream, event, timed = engine.stream(), engine.event(), engine.event(0)
        data = engine.allocate(16384)
        for _ in range(1000):
            engine.must("cuMemsetD8Async", data, 1, 16384, stream)
            engine.must("cuEventRecord", event, stream)
            engine.must("cuEventQuery", event)
            engine.must("cuEventRecord", timed, stream)
            engine.must("cuEventQuery", timed)
            engine.must("cuStreamSynchronize", stream)
        print(len(os.listdir("/proc/self/task")) - before, engine.live()["threads"])
    """)
    assert done.stdout.split() == ["0", "0"], done.stderr


def test_idle_threads_never_wake(engine, make):
    """After work of every kind the engine sleeps: no thread of it runs for two seconds."""
    stream, log = make.stream(), Log(engine)
    word, data = make.gate(stream), make.memory(1 << 20)
    engine.must("cuMemsetD8Async", data, 1, 1 << 20, stream)
    log.on(stream, 1)
    time.sleep(0.01)
    word.value = 1
    engine.must("cuStreamSynchronize", stream)
    assert engine.live()["threads"] > 0
    counts = [-1, switches()]
    for _ in range(50):  # the janitor lingers, longer on a busy machine
        if counts[-1] == counts[-2]:
            break
        time.sleep(0.1)
        counts.append(switches())
    time.sleep(2)
    assert switches() == counts[-1]


def test_quick_pollers_run_small_work_and_leave_the_rest(quick, make):
    stream, event = make.stream(), make.event()
    word, small = make.gate(stream), make.memory(16)
    threads = quick.live()["threads"]
    quick.must("cuMemsetD8Async", small, 3, 16, stream)
    quick.must("cuEventRecord", event, stream)
    end = time.monotonic() + 0.05
    while time.monotonic() < end:  # polled all the time, it stays with the pollers
        assert quick.cuEventQuery(event) == NOT_READY
    polled = quick.live()["threads"]
    word.value = 1
    assert quick.cuEventQuery(event) in (SUCCESS, NOT_READY)
    assert becomes(SUCCESS, lambda: quick.cuEventQuery(event))
    assert (
        polled - threads <= 2
    )  # the janitor, and a worker where this thread was kept from polling


def test_quick_unpolled_work_progresses(quick, make):
    stream, small = make.stream(), make.memory(16)
    for number in range(1, 20):
        word = make.gate(stream)
        quick.must("cuMemsetD8Async", small, number, 16, stream)
        time.sleep(0.002)
        word.value = 1
        end = time.monotonic() + 5
        while ctypes.string_at(small, 1) != bytes([number]):
            assert time.monotonic() < end
            time.sleep(0.0005)


def test_quick_never_calls_a_host_function_on_a_poller(quick, make):
    stream, event, callers = make.stream(), make.event(), []
    function = hostlib.HostFunction(lambda _: callers.append(threading.get_native_id()))
    for _ in range(20):
        quick.must("cuLaunchHostFunc", stream, function, None)
        quick.must("cuEventRecord", event, stream)
        quick.cuEventQuery(event)
        quick.must("cuEventSynchronize", event)
    assert len(callers) == 20
    assert threading.get_native_id() not in callers


# ---- gpulike


def test_gpulike_a_query_does_no_work(gpulike, make):
    stream, event, callers = make.stream(), make.event(), []
    function = hostlib.HostFunction(lambda _: callers.append(threading.get_native_id()))
    gpulike.must("cuLaunchHostFunc", stream, function, None)
    gpulike.must("cuEventRecord", event, stream)
    assert becomes(SUCCESS, lambda: gpulike.cuEventQuery(event))
    assert callers
    assert threading.get_native_id() not in callers


def test_gpulike_a_launch_costs_time(gpulike, make):
    gpulike.set("launch_cost_us", "500")
    stream, small = make.stream(), make.memory(16)
    begun = time.monotonic()
    for _ in range(20):
        gpulike.must("cuMemsetD8Async", small, 1, 16, stream)
    assert time.monotonic() - begun >= 20 * 0.0005
    gpulike.must("cuStreamSynchronize", stream)


def test_gpulike_a_full_queue_blocks_the_caller_and_nobody_else(gpulike, context, make):
    gpulike.set("launch_depth", "8")
    gpulike.set("launch_cost_us", "0")
    stream, event, small = make.stream(), make.event(), make.memory(16)
    gpulike.must("cuEventRecord", event, stream)
    gpulike.must("cuEventSynchronize", event)
    word = make.gate(stream)  # the first of the eight
    launched = []

    def launch() -> None:
        gpulike.must("cuCtxSetCurrent", context)
        for number in range(12):
            gpulike.must("cuMemsetD8Async", small, number, 16, stream)
            launched.append(number)

    thread = threading.Thread(target=launch)
    thread.start()
    assert becomes(7, lambda: len(launched))
    time.sleep(0.05)
    assert len(launched) == 7
    assert gpulike.cuEventQuery(event) == SUCCESS  # no lock is held by the thread that waits
    word.value = 1
    thread.join(5)
    assert len(launched) == 12
    gpulike.must("cuStreamSynchronize", stream)


def test_gpulike_memory_does_not_start_as_zeros(gpulike, make):
    assert ctypes.string_at(make.memory(1000), 1000) == b"\xff" * 1000


def test_launch_blocking(engine, temper, make):
    engine.set("launch_blocking", "1")
    stream, data = make.stream(), make.memory(1 << 20)
    engine.must("cuMemsetD8Async", data, 7, 1 << 20, stream)
    assert ctypes.string_at(data + (1 << 20) - 1, 1) == b"\x07"


# ---- the driver's lock


def test_the_drivers_lock_holds_up_every_call(engine, make):
    stream, event = make.stream(), make.event()
    for call in (
        lambda: engine.cuEventQuery(event),
        lambda: engine.cuStreamQuery(stream),
        lambda: engine.cuEventRecord(event, stream),
        lambda: engine.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())),
    ):
        engine.library.pn_host_hold_driver_lock(60)
        begun = time.monotonic()
        assert call() == SUCCESS
        assert 0.04 < time.monotonic() - begun < 5
    engine.must("cuStreamSynchronize", stream)


def test_gpulike_a_host_function_runs_under_the_drivers_lock():
    """A caller that keeps the GIL in the driver deadlocks with a function that wants it."""
    program = """
        import os, signal, time
        signal.alarm(4)
        engine.set("temper", "gpulike")
        caller = hostlib.Engine(hold_gil={hold})
        engine.must("cuInit", 0)
        engine.must("cuCtxSetCurrent", engine.made("cuDevicePrimaryCtxRetain", 0))
        stream, event, begun = engine.stream(), engine.event(), []
        function = hostlib.HostFunction(lambda _: (begun.append(1), time.sleep(0.5)))
        engine.must("cuLaunchHostFunc", stream, function, None)
        engine.must("cuEventRecord", event, stream)
        while not begun:
            time.sleep(0.001)
        print("calling", flush=True)
        caller.cuEventQuery(event)
        print("back", flush=True)
        engine.must("cuEventSynchronize", event)
        os._exit(0)
    """
    free = run_alone(program.replace("{hold}", "False"))
    assert free.stdout.split() == ["calling", "back"], free.stderr
    stuck = run_alone(program.replace("{hold}", "True"))
    assert stuck.stdout.split() == ["calling"]
    assert stuck.returncode < 0
