"""Injected faults of the driver, their grammar, and the journal."""

from __future__ import annotations

import ctypes
import threading
import time

import hostlib
import pytest
from hostlib import INVALID_HANDLE, NOT_READY, SUCCESS
from test_driver import run_alone
from test_driver_streams import Log, becomes


@pytest.mark.parametrize(
    "rules",
    [
        "",
        "op:delay=100ms,name=ncclAllReduce,rank=1;init:stuck;call:fail=2,name=ncclCommSplit,call=3;"
        "op:stuck,call=5;event:cuda_error=700;host_function:skip",
        "abort:stuck=1.5s;op:remote=6,every=2,times=3,probability=0.25",
        "init:affinity;finalize:in_progress=20;destroy:delay=0ns;op:kill,rank=0,call=2",
    ],
)
def test_rules_that_are_understood(engine, rules):
    engine.set("faults", rules)
    engine.set("faults", "")


@pytest.mark.parametrize(
    "rules",
    [
        "op",
        "op:",
        "nowhere:delay=1ms",
        "op:explode",
        "op:delay",
        "op:delay=5",
        "op:delay=-5ms",
        "op:delay=5min",
        "op:fail",
        "op:fail=x",
        "op:fail=0",
        "op:kill=3",
        "event:skip",
        "host_function:kill",
        "op:stuck,rank",
        "op:stuck,rank=",
        "op:stuck,rank=-1",
        "op:stuck,call=0",
        "op:stuck,probability=2",
        "op:stuck,colour=red",
        "op:stuck;op:explode",
        ";".join(["op:stuck"] * 65),
    ],
)
def test_rules_that_are_refused_leave_the_old_ones(engine, context, rules):
    engine.set("faults", "call:fail=999,name=cuStreamGetId")
    with pytest.raises(ValueError, match="refuses"):
        engine.set("faults", rules)
    assert engine.cuStreamGetId(None, ctypes.byref(ctypes.c_ulonglong())) == 999


def test_unknown_settings_are_refused(engine):
    for key, value in (
        ("weather", "fine"),
        ("temper", "sluggish"),
        ("launch_depth", "-1"),
        ("launch_cost_us", "5000000"),
        ("quirks", "depth-leak,nonsense"),
        ("devices", "4"),  # too late: the driver is initialised
    ):
        with pytest.raises(ValueError, match="refuses"):
            engine.set(key, value)


def struck(engine, rules, calls):
    """Which of so many calls fail."""
    engine.set("faults", rules)
    mode = ctypes.c_int(0)
    call = engine.cuThreadExchangeStreamCaptureMode
    found = [n for n in range(1, calls + 1) if call(ctypes.byref(mode)) == 999]
    engine.set("faults", "")
    return found


def test_which_calls_a_rule_takes(engine):
    assert struck(engine, "call:fail=999,call=3", 9) == [3]
    assert struck(engine, "call:fail=999,call=3,times=2", 9) == [3, 4]
    assert struck(engine, "call:fail=999,times=2", 9) == [1, 2]
    assert struck(engine, "call:fail=999,every=4", 9) == [1, 5, 9]
    assert struck(engine, "call:fail=999,call=4,every=2,times=9", 9) == [4, 6, 8]
    assert struck(engine, "call:fail=999,name=cuCtxSynchronize", 9) == []
    assert struck(engine, "call:fail=999,rank=1", 9) == []
    # the first rule has its turn; the second counts that call and keeps its own turn for later
    assert struck(engine, "call:fail=5,call=2;call:fail=999,call=2,every=2,times=2", 9) == [
        4,
        6,
    ]


def test_chance_comes_from_the_seed(engine):
    rule = "call:fail=999,probability=0.5"
    engine.set("seed", "7")
    first = struck(engine, rule, 200)
    assert struck(engine, rule, 200) == first
    engine.set("seed", "8")
    assert struck(engine, rule, 200) != first
    engine.set("seed", "1")
    assert 60 < len(first) < 140


def test_a_call_can_be_delayed_or_stuck(engine, context, make):
    stream = make.stream()
    engine.set("faults", "call:delay=60ms,name=cuStreamQuery")
    begun = time.monotonic()
    assert engine.cuStreamQuery(stream) == SUCCESS
    assert time.monotonic() - begun >= 0.06
    engine.set("faults", "call:stuck,name=cuStreamQuery,call=1")
    answers = []

    def call() -> None:
        engine.must("cuCtxSetCurrent", context)
        answers.append(engine.cuStreamQuery(stream))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    engine.set("faults", "")
    thread.join(5)
    assert answers == [SUCCESS]


def test_a_failing_call_has_done_nothing(engine, context, make):
    stream = make.stream()
    engine.set("faults", "call:fail=400,name=cuStreamDestroy_v2,call=1")
    assert engine.cuStreamDestroy_v2(stream) == INVALID_HANDLE
    assert engine.cuStreamQuery(stream) == SUCCESS


def test_a_call_can_kill_the_process():
    done = run_alone("""
        engine.set("faults", "call:kill,name=cuDeviceGetCount")
        engine.must("cuInit", 0)
        print("alive", flush=True)
        engine.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
        print("still alive", flush=True)
    """)
    assert (done.stdout.split(), done.returncode) == (["alive"], -9)


def test_an_event_can_be_late_or_stuck(engine, make):
    stream, late, stuck = make.stream(), make.event(), make.event()
    engine.set("faults", "event:delay=80ms,call=1;event:stuck,call=2")
    begun = time.monotonic()
    engine.must("cuEventRecord", late, stream)
    assert engine.cuEventQuery(late) == NOT_READY
    engine.must("cuEventSynchronize", late)
    assert time.monotonic() - begun >= 0.08
    engine.must("cuEventRecord", stuck, stream)
    time.sleep(0.05)
    assert engine.cuEventQuery(stuck) == NOT_READY
    engine.set("faults", "")
    assert becomes(SUCCESS, lambda: engine.cuEventQuery(stuck))


def test_host_functions_can_be_skipped(engine, make):
    stream, log = make.stream(), Log(engine)
    engine.set("faults", "host_function:skip,call=2")
    for number in (1, 2, 3):
        log.on(stream, number)
    engine.must("cuStreamSynchronize", stream)
    assert log.seen == [1, 3]


# ---- the journal


def test_the_journal_has_every_call(engine, context, make):
    stream, event = make.stream(), make.event()
    with engine.journal() as calls:
        engine.must("cuEventRecord", event, stream)
        engine.cuEventSynchronize(0x1234)
        engine.must("cuEventSynchronize", event)
        thread = threading.Thread(target=engine.cuCtxSynchronize)
        thread.start()
        thread.join()
    engine.cuStreamQuery(stream)
    seen = [(c.function, c.result, c.device, c.stream, c.object) for c in calls]
    assert seen == [
        (b"cuEventRecord", SUCCESS, 0, stream, event),
        (b"cuEventSynchronize", INVALID_HANDLE, 0, 0, 0x1234),
        (b"cuEventSynchronize", SUCCESS, 0, 0, event),
        (b"cuCtxSynchronize", hostlib.INVALID_CONTEXT, -1, 0, 0),
    ]
    assert calls[0].thread == threading.get_native_id() != calls[3].thread
    assert [c.time_ns for c in calls] == sorted(c.time_ns for c in calls)


def test_the_journal_knows_the_name_of_every_function(engine, temper):
    """Each exported function writes its own name, also where it refuses its arguments."""
    names = [name for name in hostlib.FUNCTIONS if name.startswith("cu")]
    harmless = {kind: kind(0) for kind in (ctypes.c_int, ctypes.c_uint, ctypes.c_size_t)}
    with engine.journal() as calls:
        for name in names:
            kinds = hostlib.FUNCTIONS[name][1]
            getattr(engine, name)(*[harmless.get(kind, kind(0)) for kind in kinds])
    assert [call.function for call in calls] == [name.encode()[:31] for name in names]


def test_the_journal_is_bounded(engine, context):
    with engine.journal(capacity=3) as calls:
        for _ in range(5):
            engine.cuCtxSynchronize()
    assert len(calls) == 3
