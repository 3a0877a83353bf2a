"""Stream capture: what is written down, what a launch runs, and what breaks a capture."""

from __future__ import annotations

import ctypes
import threading
import time

import graphs
import hostlib
import pytest
from graphs import ACTIVE, GLOBAL, INVALIDATED, NONE, RELAXED, THREAD_LOCAL
from hostlib import (
    CAPTURE_INVALIDATED,
    CAPTURE_UNSUPPORTED,
    INVALID_VALUE,
    NOT_SUPPORTED,
    SUCCESS,
)

ILLEGAL_STATE = 401
MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = range(902, 909)
UPDATE_FAILURE = 910


def in_thread(engine, context, function):
    """The function's value, on a thread with the same context."""
    values = []

    def run():
        engine.must("cuCtxSetCurrent", context)
        values.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return values[0]


def words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint32 * count).from_address(address))


# ---- what is captured, and what a launch does


def test_what_is_captured_runs_at_each_launch_and_not_before(engine, context, make):
    stream = make.stream()
    source, target = make.memory(64), make.memory(64)
    engine.must("cuMemsetD8_v2", target, 0, 64)

    def body():
        engine.must("cuMemcpyAsync", target, source, 32, stream)
        engine.must("cuMemsetD16Async", target + 32, 0x0201, 4, stream)
        engine.must("cuMemsetD32Async", target + 40, 77, 6, stream)

    graph = graphs.captured(engine, stream, body)
    assert graphs.status(engine, stream) == NONE
    engine.must("cuStreamSynchronize", stream)
    assert words(target, 16) == [0] * 16
    with graphs.executable(engine, graph) as made:
        for value in (3, 4):
            engine.must("cuMemsetD32_v2", source, value, 16)
            engine.must("cuGraphLaunch", made, stream)
            engine.must("cuStreamSynchronize", stream)
            assert words(target, 16) == [value] * 8 + [0x02010201] * 2 + [77] * 6


def test_host_functions_run_in_the_order_of_the_captured_forks(engine, context, make):
    main, side = make.stream(), make.stream()
    forked, joined = make.event(), make.event()
    order = []
    callbacks = {
        name: hostlib.HostFunction(lambda _, name=name: order.append(name))
        for name in ("first", "main", "side", "last")
    }

    def call(stream, name):
        engine.must("cuLaunchHostFunc", stream, callbacks[name], None)

    def body():
        call(main, "first")
        engine.must("cuEventRecord", forked, main)
        engine.must("cuStreamWaitEvent", side, forked, 0)
        assert graphs.status(engine, side) == ACTIVE
        call(side, "side")
        call(main, "main")
        engine.must("cuEventRecord", joined, side)
        engine.must("cuStreamWaitEvent", main, joined, 0)
        call(main, "last")

    graph = graphs.captured(engine, main, body)
    assert graphs.status(engine, side) == NONE
    count = ctypes.c_size_t()
    engine.must("cuGraphGetNodes", graph, None, ctypes.byref(count))
    assert count.value == 4
    with graphs.executable(engine, graph) as made:
        for _ in range(3):
            engine.must("cuGraphLaunch", made, main)
        engine.must("cuStreamSynchronize", main)
    for launch in (order[:4], order[4:8], order[8:]):
        assert launch[0] == "first"
        assert launch[3] == "last"
        assert set(launch[1:3]) == {"main", "side"}


def test_what_does_not_depend_on_each_other_runs_at_the_same_time(engine, context, make):
    """One branch waits for a word that the other one writes, queued before it and behind it."""
    main, side = make.stream(), make.stream()
    forked, joined = make.event(), make.event()
    word, other = make.word(), make.word()
    address, second = ctypes.addressof(word), ctypes.addressof(other)

    def body():
        engine.must("cuEventRecord", forked, main)
        engine.must("cuStreamWaitEvent", side, forked, 0)
        engine.must("cuStreamWaitValue32_v2", main, address, 1, 0)
        engine.must("cuStreamWriteValue32_v2", main, second, 1, 0)
        engine.must("cuStreamWriteValue32_v2", side, address, 1, 0)
        engine.must("cuStreamWaitValue32_v2", side, second, 1, 0)
        engine.must("cuEventRecord", joined, side)
        engine.must("cuStreamWaitEvent", main, joined, 0)

    with graphs.executable(engine, graphs.captured(engine, main, body)) as made:
        engine.must("cuGraphLaunch", made, main)
        engine.must("cuStreamSynchronize", main)
    assert (word.value, other.value) == (1, 1)


def test_launches_of_one_graph_follow_each_other_on_any_stream(engine, context, make):
    one, two = make.stream(), make.stream()
    gate = make.gate(one)
    target = make.memory(8)
    graph = graphs.captured(
        engine, two, lambda: engine.must("cuMemsetD8Async", target, 9, 8, two)
    )
    engine.must("cuMemsetD8_v2", target, 0, 8)
    with graphs.executable(engine, graph) as made:
        engine.must("cuGraphLaunch", made, one)
        engine.must("cuGraphLaunch", made, two)  # behind the one that the gate holds
        time.sleep(0.02)
        assert engine.cuStreamQuery(two) == hostlib.NOT_READY
        gate.value = 1
        engine.must("cuStreamSynchronize", two)
        assert words(target, 2) == [0x09090909] * 2


def test_an_executable_graph_can_go_while_it_runs(engine, context, make):
    stream = make.stream()
    gate, target = make.gate(stream), make.memory(4)
    graph = graphs.captured(
        engine,
        other := make.stream(),
        lambda: engine.must("cuMemsetD8Async", target, 5, 4, other),
    )
    with graphs.executable(engine, graph) as made:
        engine.must("cuGraphLaunch", made, stream)
    assert engine.cuGraphLaunch(made, stream) == INVALID_VALUE
    assert engine.cuGraphDestroy(graph) == INVALID_VALUE
    gate.value = 1
    engine.must("cuStreamSynchronize", stream)
    assert words(target, 1) == [0x05050505]


def test_an_empty_graph_and_an_upload(engine, context, make):
    stream = make.stream()
    with graphs.executable(engine, graphs.captured(engine, stream, lambda: None)) as made:
        engine.must("cuGraphUpload", made, stream)
        engine.must("cuGraphLaunch", made, stream)
        engine.must("cuStreamSynchronize", stream)


def test_what_a_stream_says_of_its_capture(engine, context, make):
    main, side = make.stream(), make.stream()
    event, target = make.event(), make.memory(4)
    graphs.begin(engine, main)
    engine.must("cuMemsetD8Async", target, 1, 4, main)
    engine.must("cuEventRecord", event, main)
    engine.must("cuStreamWaitEvent", side, event, 0)

    def told(stream):
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        nodes, edges, count = ctypes.c_void_p(), ctypes.c_void_p(7), ctypes.c_size_t()
        out = [ctypes.byref(x) for x in (status, number, graph, nodes, edges, count)]
        engine.must("cuStreamGetCaptureInfo_v3", stream, *out)
        assert edges.value is None
        return status.value, number.value, graph.value, count.value

    assert told(main) == told(side)
    status, number, graph, count = told(main)
    assert (status, count) == (ACTIVE, 1)
    assert number > 0
    assert engine.cuGraphDestroy(graph) == INVALID_VALUE  # not before its capture has ended
    made = ctypes.c_void_p()
    instantiate = engine.cuGraphInstantiateWithFlags
    assert instantiate(ctypes.byref(made), graph, 0) == INVALID_VALUE
    engine.must("cuMemsetD8Async", target, 2, 4, side)
    code, ended = graphs.end(engine, main)
    assert (code, ended) == (UNJOINED, 0)  # nobody waits for the side stream
    assert graph is not None
    engine.must("cuStreamSynchronize", main)


# ---- what is refused


def test_what_is_not_captured_is_refused_and_breaks_the_capture(engine, context, make):
    stream, target = make.stream(), make.memory(4)
    graph = graphs.captured(
        engine, stream, lambda: engine.must("cuMemsetD8Async", target, 1, 4, stream)
    )
    with graphs.executable(engine, graph) as made:
        graphs.begin(engine, stream)
        pointer = ctypes.c_ulonglong()
        assert engine.cuMemAllocAsync(ctypes.byref(pointer), 64, stream) == NOT_SUPPORTED
        assert graphs.status(engine, stream) == ACTIVE
        assert engine.cuGraphLaunch(made, stream) == CAPTURE_UNSUPPORTED
        assert graphs.status(engine, stream) == INVALIDATED
        assert engine.cuMemsetD8Async(target, 1, 4, stream) == CAPTURE_INVALIDATED
        assert graphs.end(engine, stream) == (CAPTURE_INVALIDATED, 0)
        result = (ctypes.c_char * 24)()
        again = graphs.captured(engine, stream, lambda: None)
        assert engine.cuGraphExecUpdate_v2(made, again, result) == UPDATE_FAILURE
        assert result[0] == b"\x06"
        engine.must("cuGraphDestroy", again)
        assert engine.cuGraphInstantiateWithFlags(result, again, 0) == INVALID_VALUE
    event = make.event()
    assert engine.cuEventRecordWithFlags(event, stream, 1) == NOT_SUPPORTED
    assert engine.cuStreamWaitEvent(stream, event, 1) == NOT_SUPPORTED


def test_wrong_beginnings_and_ends(engine, context, make):
    stream, other = make.stream(), make.stream()
    event = make.event()
    assert graphs.end(engine, stream) == (ILLEGAL_STATE, 0)
    assert engine.cuStreamBeginCapture_v2(stream, 3) == INVALID_VALUE
    assert engine.cuStreamBeginCapture_v2(None, 0) == CAPTURE_UNSUPPORTED
    graphs.begin(engine, stream)
    assert engine.cuStreamBeginCapture_v2(stream, 0) == ILLEGAL_STATE
    assert in_thread(engine, context, lambda: graphs.end(engine, stream)[0]) == WRONG_THREAD
    engine.must("cuEventRecord", event, stream)
    engine.must("cuStreamWaitEvent", other, event, 0)
    assert graphs.end(engine, other) == (UNMATCHED, 0)
    assert graphs.end(engine, stream) == (CAPTURE_INVALIDATED, 0)
    assert graphs.status(engine, other) == NONE
    graphs.begin(engine, stream, RELAXED)
    code, graph = in_thread(engine, context, lambda: graphs.end(engine, stream))
    assert code == SUCCESS
    engine.must("cuGraphDestroy", graph)


def test_dependencies_that_leave_the_capture(engine, context, make):
    one, two, outside = make.stream(), make.stream(), make.stream()
    event, plain = make.event(), make.event()
    engine.must("cuEventRecord", plain, outside)
    graphs.begin(engine, one)
    assert engine.cuStreamWaitEvent(one, plain, 0) == ISOLATION
    assert graphs.end(engine, one)[0] == CAPTURE_INVALIDATED
    graphs.begin(engine, one)
    graphs.begin(engine, two)
    engine.must("cuEventRecord", event, one)
    assert engine.cuStreamWaitEvent(two, event, 0) == MERGE
    assert graphs.end(engine, one)[0] == graphs.end(engine, two)[0] == CAPTURE_INVALIDATED
    # the event is the past capture's, and stands for nothing
    assert engine.cuStreamWaitEvent(outside, event, 0) == CAPTURED_EVENT
    assert engine.cuEventQuery(event) == CAPTURED_EVENT
    engine.must("cuEventRecord", event, outside)
    engine.must("cuEventSynchronize", event)


def test_the_legacy_stream_and_a_capture_of_a_blocking_stream(engine, context, make):
    blocking, target = make.stream(flags=0), make.memory(4)
    for call in (
        lambda: engine.cuMemsetD8Async(target, 1, 4, None),
        lambda: engine.cuStreamSynchronize(None),
        lambda: engine.cuEventRecord(make.event(), hostlib.LEGACY),
        lambda: engine.cuStreamIsCapturing(None, ctypes.byref(ctypes.c_int())),
    ):
        graphs.begin(engine, blocking)
        assert call() == IMPLICIT
        assert graphs.end(engine, blocking)[0] == CAPTURE_INVALIDATED
    graphs.begin(engine, stream := make.stream())
    engine.must("cuMemsetD8Async", target, 1, 4, None)  # of this one it knows nothing
    code, graph = graphs.end(engine, stream)
    assert code == SUCCESS
    engine.must("cuGraphDestroy", graph)


def test_a_stream_that_ends_while_it_captures(engine, context, make):
    stream = engine.stream()
    graphs.begin(engine, stream)
    engine.must("cuStreamDestroy_v2", stream)
    engine.must("cuStreamSynchronize", make.stream())  # nothing is captured any more


# ---- what breaks whose capture

UNSAFE = {
    "an event query": lambda engine, things: engine.cuEventQuery(things["event"]),
    "an event wait": lambda engine, things: engine.cuEventSynchronize(things["event"]),
    "a stream query": lambda engine, things: engine.cuStreamQuery(things["idle"]),
    "a stream wait": lambda engine, things: engine.cuStreamSynchronize(things["idle"]),
    "an allocation": lambda engine, things: engine.cuMemAlloc_v2(
        ctypes.byref(things["pointer"]), 64
    ),
    "pinned memory": lambda engine, things: engine.cuMemHostAlloc(
        ctypes.byref(things["pinned"]), 64, 0
    ),
    "a copy that waits": lambda engine, things: engine.cuMemcpyDtoH_v2(
        things["word"], things["memory"], 4
    ),
}


@pytest.mark.parametrize("call", UNSAFE)
@pytest.mark.parametrize("own_thread", [True, False])
@pytest.mark.parametrize("of_thread", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("of_capture", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_unsafe_calls(engine, context, make, of_capture, of_thread, own_thread, call):
    """The rules of cuThreadExchangeStreamCaptureMode, for each call that no capture sees."""
    stream = make.stream()
    things = {
        "event": make.event(),
        "idle": make.stream(),
        "memory": make.memory(4),
        "word": ctypes.addressof(word := ctypes.c_uint32()),
        "pointer": ctypes.c_ulonglong(),
        "pinned": ctypes.c_void_p(),
    }
    breaks = of_thread != RELAXED and (
        of_capture != RELAXED if own_thread else (of_capture, of_thread) == (GLOBAL, GLOBAL)
    )

    def ask():
        with graphs.capture_mode(engine, of_thread):
            return UNSAFE[call](engine, things)

    graphs.begin(engine, stream, of_capture)
    code = ask() if own_thread else in_thread(engine, context, ask)
    ended, graph = graphs.end(engine, stream)
    for destroy, made in (("cuMemFree_v2", "pointer"), ("cuMemFreeHost", "pinned")):
        if things[made].value:
            engine.must(destroy, things[made])
    if graph:
        engine.must("cuGraphDestroy", graph)
    expected = (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED) if breaks else (SUCCESS, SUCCESS)
    assert (code, ended) == expected
    assert word.value in (0, 0xFFFFFFFF)


def test_to_ask_about_what_is_captured_breaks_it_in_any_mode(engine, context, make):
    stream, event = make.stream(), make.event()
    for ask in (
        lambda: engine.cuStreamQuery(stream),
        lambda: engine.cuStreamSynchronize(stream),
        lambda: engine.cuEventQuery(event),
        lambda: engine.cuEventSynchronize(event),
        engine.cuCtxSynchronize,
    ):
        graphs.begin(engine, stream, RELAXED)
        engine.must("cuEventRecord", event, stream)
        with graphs.capture_mode(engine, RELAXED):
            assert ask() in (CAPTURE_UNSUPPORTED, CAPTURED_EVENT)
        assert graphs.end(engine, stream)[0] == CAPTURE_INVALIDATED
