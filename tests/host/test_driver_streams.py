"""Order on and between streams of the host engine, in both tempers."""

from __future__ import annotations

import ctypes
import threading
import time
from itertools import pairwise

import hostlib
import pytest
from hostlib import INVALID_HANDLE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, SUCCESS


def becomes(code, call, seconds=5.0):
    """Call until it answers the code; False after so many seconds."""
    end = time.monotonic() + seconds
    while call() != code:
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


class Log:
    """Host functions that note their number, from 1 on, when they are called."""

    def __init__(self, engine):
        self.engine = engine
        self.seen = []
        self._function = hostlib.HostFunction(lambda number: self.seen.append(number))

    def on(self, stream, number):
        self.engine.must("cuLaunchHostFunc", stream, self._function, number)


def test_a_stream_is_in_order(engine, make):
    stream, log = make.stream(), Log(engine)
    data = make.memory(64 * 1024)
    for number in range(1, 200):
        engine.must("cuMemsetD8Async", data, number, 16 if number % 3 else 64 * 1024, stream)
        log.on(stream, number)
    engine.must("cuStreamSynchronize", stream)
    assert log.seen == list(range(1, 200))
    assert ctypes.string_at(data, 1) == bytes([199])


def test_query_and_synchronize_agree(engine, make):
    stream, event = make.stream(), make.event()
    word = make.gate(stream)
    engine.must("cuEventRecord", event, stream)
    for _ in range(100):
        assert engine.cuEventQuery(event) == NOT_READY
        assert engine.cuStreamQuery(stream) == NOT_READY
    word.value = 1
    assert becomes(SUCCESS, lambda: engine.cuEventQuery(event))
    assert becomes(SUCCESS, lambda: engine.cuStreamQuery(stream))
    engine.must("cuEventSynchronize", event)


def test_an_event_that_was_never_recorded_is_done(engine, make):
    stream, event = make.stream(), make.event()
    assert engine.cuEventQuery(event) == SUCCESS
    engine.must("cuEventSynchronize", event)
    engine.must("cuStreamWaitEvent", stream, event, 0)
    engine.must("cuStreamSynchronize", stream)


def test_an_event_means_its_last_record(engine, make):
    first, second, event = make.stream(), make.stream(), make.event()
    word = make.gate(first)
    engine.must("cuEventRecord", event, first)
    assert engine.cuEventQuery(event) == NOT_READY
    engine.must("cuEventRecord", event, second)
    engine.must("cuEventSynchronize", event)
    assert engine.cuStreamQuery(first) == NOT_READY
    word.value = 1
    engine.must("cuStreamSynchronize", first)


def test_a_wait_means_the_record_before_it(engine, make):
    """Recording the event again does not free, nor bind, whoever waited before."""
    first, second, waiter, event = make.stream(), make.stream(), make.stream(), make.event()
    word = make.gate(first)
    engine.must("cuEventRecord", event, first)
    engine.must("cuStreamWaitEvent", waiter, event, 0)
    engine.must("cuEventRecord", event, second)
    time.sleep(0.02)
    assert engine.cuStreamQuery(waiter) == NOT_READY
    word.value = 1
    engine.must("cuStreamSynchronize", waiter)


@pytest.mark.parametrize("poll", ["last", "nobody", "synchronize"])
def test_a_chain_of_streams(engine, make, poll):
    streams = [make.stream() for _ in range(6)]
    word, log = make.gate(streams[0]), Log(engine)
    for number, (before, after) in enumerate(pairwise(streams), start=1):
        event = make.event()
        engine.must("cuEventRecord", event, before)
        engine.must("cuStreamWaitEvent", after, event, 0)
        log.on(after, number)
    time.sleep(0.02)
    assert log.seen == []
    word.value = 1
    if poll == "last":
        assert becomes(SUCCESS, lambda: engine.cuStreamQuery(streams[-1]))
    elif poll == "synchronize":
        engine.must("cuStreamSynchronize", streams[-1])
    else:
        assert becomes(5, lambda: len(log.seen))
    assert log.seen == [1, 2, 3, 4, 5]


def test_two_streams_run_side_by_side(engine, make):
    held, free = make.stream(), make.stream()
    word, log = make.gate(held), Log(engine)
    log.on(held, 1)
    log.on(free, 2)
    engine.must("cuStreamSynchronize", free)
    assert log.seen == [2]
    word.value = 1
    engine.must("cuStreamSynchronize", held)
    assert log.seen == [2, 1]


def test_waits_across_devices(engine, context, make):
    here, event = make.stream(), make.event()
    word = make.gate(here)
    engine.must("cuEventRecord", event, here)
    engine.must("cuCtxSetCurrent", engine.made("cuDevicePrimaryCtxRetain", 2))
    there = engine.stream()
    engine.must("cuStreamWaitEvent", there, event, 0)
    assert engine.cuStreamQuery(there) == NOT_READY
    word.value = 1
    engine.must("cuStreamSynchronize", there)
    engine.must("cuStreamDestroy_v2", there)
    engine.must("cuDevicePrimaryCtxRelease_v2", 2)
    engine.must("cuCtxSetCurrent", context)


def test_the_legacy_stream_waits_for_blocking_streams(engine, make):
    blocking, apart = make.stream(0), make.stream()
    word, log = make.gate(blocking), Log(engine)
    log.on(None, 1)
    log.on(apart, 2)
    engine.must("cuStreamSynchronize", apart)
    time.sleep(0.02)
    assert log.seen == [2]
    assert engine.cuStreamQuery(None) == NOT_READY
    word.value = 1
    engine.must("cuStreamSynchronize", None)
    assert log.seen == [2, 1]


def test_blocking_streams_wait_for_the_legacy_stream(engine, make):
    blocking, apart, event = make.stream(0), make.stream(), make.event()
    word, log = make.gate(hostlib.LEGACY), Log(engine)
    engine.must("cuEventRecord", event, hostlib.LEGACY)
    log.on(blocking, 1)
    log.on(hostlib.PER_THREAD, 2)
    log.on(apart, 3)
    engine.must("cuStreamSynchronize", apart)
    time.sleep(0.02)
    assert log.seen == [3]
    assert engine.cuEventQuery(event) == NOT_READY
    word.value = 1
    engine.must("cuStreamSynchronize", blocking)
    engine.must("cuStreamSynchronize", hostlib.PER_THREAD)
    assert sorted(log.seen) == [1, 2, 3]


def test_the_context_waits_for_all_its_streams(engine, make):
    streams = [make.stream() for _ in range(4)]
    log, words = Log(engine), [make.gate(stream) for stream in streams]
    for stream in streams:
        log.on(stream, 1)
    threading.Timer(0.03, lambda: [setattr(word, "value", 1) for word in words]).start()
    engine.must("cuCtxSynchronize")
    assert log.seen == [1] * 4


@pytest.mark.timing
def test_destroying_returns_at_once_and_the_work_is_done(engine, make):
    stream, event, log = engine.stream(), engine.event(), Log(engine)
    word = make.gate(stream)
    log.on(stream, 1)
    engine.must("cuEventRecord", event, stream)
    begun = time.monotonic()
    engine.must("cuStreamDestroy_v2", stream)
    engine.must("cuEventDestroy_v2", event)
    assert time.monotonic() - begun < 0.1
    assert log.seen == []
    assert engine.cuEventQuery(event) == INVALID_HANDLE
    word.value = 1
    assert becomes(1, lambda: len(log.seen))
    assert becomes(0, lambda: engine.live()["work_items"])


def test_freeing_waits_for_the_work(engine, make):
    stream, memory = make.stream(), engine.allocate(1 << 20)
    word = make.gate(stream)
    engine.must("cuMemsetD8Async", memory, 1, 1 << 20, stream)
    threading.Timer(0.05, lambda: setattr(word, "value", 1)).start()
    begun = time.monotonic()
    engine.must("cuMemFree_v2", memory)
    assert time.monotonic() - begun > 0.04
    assert engine.cuStreamQuery(stream) == SUCCESS


def test_elapsed_time(engine, make):
    stream = make.stream()
    start, end, untimed = make.event(0), make.event(0), make.event()
    milliseconds = ctypes.c_float()

    def elapsed(first, last):
        return engine.cuEventElapsedTime(ctypes.byref(milliseconds), first, last)

    assert elapsed(start, end) == INVALID_HANDLE  # never recorded
    engine.must("cuEventRecord", start, stream)
    word = make.gate(stream)
    engine.must("cuEventRecord", end, stream)
    engine.must("cuEventRecord", untimed, stream)
    engine.must("cuEventSynchronize", start)
    assert elapsed(start, end) == NOT_READY
    time.sleep(0.05)
    word.value = 1
    engine.must("cuEventSynchronize", end)
    assert elapsed(start, end) == SUCCESS
    assert 45 < milliseconds.value < 1000
    assert elapsed(start, untimed) == INVALID_HANDLE


@pytest.mark.timing
def test_a_host_store_frees_a_waiting_stream_soon(engine, make):
    """The worker looks often: every few dozen microseconds while it has not waited long."""
    stream, event, delays = make.stream(), make.event(), []
    for _ in range(30):
        word = make.gate(stream)
        engine.must("cuEventRecord", event, stream)
        time.sleep(0.003)
        log, done = [], threading.Event()
        function = hostlib.HostFunction(
            lambda _, d=done, s=log: (s.append(time.monotonic()), d.set())
        )
        engine.must("cuLaunchHostFunc", stream, function, None)
        stored = time.monotonic()
        word.value = 1
        assert done.wait(5)
        delays.append(log[0] - stored)
    engine.must("cuStreamSynchronize", stream)
    assert min(delays) < 0.0005  # the best of them: a busy machine delays any thread


def test_memory_waits_compare_as_the_driver_says(engine, make):
    stream, other, word = make.stream(), make.stream(), make.word()
    address = ctypes.addressof(word)
    word.value = 5
    engine.must("cuStreamWaitValue32_v2", stream, address, 5, 0)
    engine.must("cuStreamWaitValue32_v2", stream, address, 3, 0)
    engine.must("cuStreamWaitValue32_v2", stream, address, (1 << 32) - 7, 0)  # cyclic: behind 5
    engine.must("cuStreamSynchronize", stream)
    engine.must("cuStreamWaitValue32_v2", stream, address, 6, 0)
    assert engine.cuStreamQuery(stream) == NOT_READY
    engine.must("cuStreamWriteValue32_v2", other, address, 6, 0)
    engine.must("cuStreamSynchronize", stream)
    assert word.value == 6


def test_memory_waits_need_memory_of_the_device(engine, make):
    stream, mine = make.stream(), ctypes.c_uint32(1)
    word = ctypes.addressof(make.word())
    wait = engine.cuStreamWaitValue32_v2
    assert wait(stream, ctypes.addressof(mine), 1, 0) == INVALID_VALUE
    assert wait(stream, word + 2, 0, 0) == INVALID_VALUE
    assert wait(stream, word, 0, 1) == NOT_SUPPORTED
    engine.set("quirks", "no-memory-ops")
    assert wait(stream, word, 0, 0) == NOT_SUPPORTED
    value = ctypes.c_int(-1)
    engine.must("cuDeviceGetAttribute", ctypes.byref(value), 92, 0)
    assert value.value == 0


def test_many_threads_on_many_streams(engine, context, make):
    """Each thread adds on its own stream, every third step behind another thread's stream."""
    streams, events = [make.stream() for _ in range(4)], [make.event() for _ in range(4)]
    rounds, failures = 300, []
    data = [make.memory(32 * 1024) for _ in streams]

    def work(index):
        try:
            engine.must("cuCtxSetCurrent", context)
            for number in range(rounds):
                size = 32 * 1024 if number % 5 == 0 else 64
                engine.must("cuMemsetD8Async", data[index], number % 251, size, streams[index])
                engine.must("cuEventRecord", events[index], streams[index])
                if number % 3 == 0:
                    behind = events[(index + 1) % 4]
                    engine.must("cuStreamWaitEvent", streams[index], behind, 0)
                if number % 7 == 0:
                    engine.must("cuEventSynchronize", events[index])
                engine.cuEventQuery(events[(index + 2) % 4])
            engine.must("cuStreamSynchronize", streams[index])
            if ctypes.string_at(data[index], 64) != bytes([(rounds - 1) % 251]) * 64:
                failures.append(f"stream {index} has lost the last fill")
        except Exception as error:  # told by the main thread
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
