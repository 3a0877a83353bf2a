"""The driver's inner contract (host.h): items on a stream, as the NCCL half makes them.

Its functions are hidden in the engine, so its driver's files are compiled here with all names
visible. The steps are Python functions: they say at each call whether they are blocked.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import threading
import time
from pathlib import Path

import hostlib
import pytest
from hostlib import ILLEGAL_ADDRESS, INVALID_CONTEXT, NOT_READY, SUCCESS
from test_driver_streams import becomes

HOST = Path(__file__).parents[2] / "src" / "host"
SOURCES = [
    HOST / f"{name}.c" for name in ("bell", "config", "fault", "journal", "misuse", "share")
]
BLOCKED, DONE = 0, 1
KERNEL, COPY, HOST_FUNCTION, MARK = range(4)
POLL_BYTES = 16 * 1024


class Bell(ctypes.Structure):
    _fields_ = (("rung", ctypes.c_uint32), ("sleepers", ctypes.c_uint32))


class WorkItem(ctypes.Structure):
    """host_work_t."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("again", ctypes.c_void_p),
        ("kind", ctypes.c_int),
        ("bytes", ctypes.c_size_t),
        ("device", ctypes.c_int),
        ("bell", ctypes.POINTER(Bell)),
        ("status", ctypes.c_int),
        ("moves", ctypes.c_uint32),
        ("unrung", ctypes.c_bool),
        ("started", ctypes.c_bool),
        ("counted", ctypes.c_bool),
        ("moves_seen", ctypes.c_uint32),
        ("tries", ctypes.c_uint32),
    )


Step = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(WorkItem))
Release = ctypes.CFUNCTYPE(None, ctypes.POINTER(WorkItem))


class Item:
    """An item that is blocked until it is told to go on."""

    def __init__(self, engine, *, kind=KERNEL, nbytes=0, status=SUCCESS, turn=False):
        self.engine, self.turn, self.status = engine, turn, status
        self.go = False
        self.stepped, self.released = [], []  # the threads
        self.times = []
        self.bell = Bell()
        self._step, self._release = Step(self.step), Release(self.release)
        self.work = WorkItem(kind=kind, bytes=nbytes)
        self.work.step = ctypes.cast(self._step, ctypes.c_void_p)
        self.work.release = ctypes.cast(self._release, ctypes.c_void_p)

    def step(self, work):
        self.stepped.append(threading.get_native_id())
        self.times.append(time.monotonic())
        library = self.engine.library
        if self.turn and not library.host_device_enter(work[0].device, work):
            return BLOCKED
        work[0].bell = ctypes.pointer(self.bell)
        if not self.go:
            return BLOCKED
        work[0].status = self.status
        if self.turn:
            library.host_device_leave(work[0].device, work)
        return DONE

    def release(self, _):
        self.released.append(threading.get_native_id())

    def submit(self, stream):
        return self.engine.library.host_stream_submit(
            ctypes.c_void_p(stream), ctypes.byref(self.work)
        )

    def ring(self):
        self.go = True
        self.engine.library.host_bell_ring(ctypes.byref(self.bell))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    target = tmp_path_factory.mktemp("driver") / "libdriver.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread", "-o", target]
    sources = [*SOURCES, *sorted(HOST.glob("driver_*.c"))]
    subprocess.run([*command, *sources], check=True, timeout=120)
    loaded = hostlib.Engine(path=target)
    loaded.library.host_device_enter.restype = ctypes.c_bool
    loaded.must("cuInit", 0)
    return loaded


@pytest.fixture
def item(engine):
    """Make items, and see at the end that each was released once."""
    made = []

    def make_item(**how):
        made.append(Item(engine, **how))
        return made[-1]

    yield make_item
    for one in made:
        if one.stepped or one.released:
            one.ring()
            assert becomes(1, lambda one=one: len(one.released))


def test_an_item_steps_until_it_is_done_and_is_released_once(engine, make, item):
    stream, event, first, second = make.stream(), make.event(), item(), item()
    assert first.submit(stream) == SUCCESS
    assert second.submit(stream) == SUCCESS
    engine.must("cuEventRecord", event, stream)
    assert becomes(True, lambda: bool(first.stepped))
    assert engine.cuEventQuery(event) == NOT_READY
    assert second.stepped == []
    second.go = True
    first.ring()
    engine.must("cuEventSynchronize", event)
    assert len(first.released) == len(second.released) == 1


@pytest.mark.timing
def test_a_ring_reaches_whoever_sleeps(engine, make, item):
    stream, one = make.stream(), item()
    one.submit(stream)
    steps = -1
    while steps != len(one.stepped):  # it tries for a while before it sleeps on the bell
        steps = len(one.stepped)
        time.sleep(0.03)
    time.sleep(0.03)
    assert len(one.stepped) - steps <= 2  # and does not poll
    begun = time.monotonic()
    one.ring()
    engine.must("cuStreamSynchronize", stream)
    assert time.monotonic() - begun < 0.05  # long before it would look again unasked


def test_a_lost_ring_is_made_good(engine, make, item):
    stream, one = make.stream(), item()
    one.submit(stream)
    time.sleep(0.03)
    one.go = True
    assert becomes(1, lambda: len(one.released), seconds=1)


def test_a_synchronizing_thread_sleeps_on_the_bell_too(engine, context, make, item):
    stream, one = make.stream(), item()
    one.submit(stream)
    answers = []

    def wait() -> None:
        engine.must("cuCtxSetCurrent", context)
        answers.append(engine.cuStreamSynchronize(stream))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    one.ring()
    thread.join(5)
    assert answers == [SUCCESS]


def test_a_status_becomes_the_sticky_error(engine, temper, item):
    engine.must("cuCtxSetCurrent", engine.made("cuDevicePrimaryCtxRetain", 3))
    stream, other = engine.stream(), engine.stream()
    bad, after, elsewhere = item(status=ILLEGAL_ADDRESS), item(), item()
    for one, where in ((bad, stream), (after, stream), (elsewhere, other)):
        assert one.submit(where) == SUCCESS
    assert becomes(True, lambda: bool(elsewhere.stepped))
    bad.ring()
    assert engine.cuStreamSynchronize(stream) == ILLEGAL_ADDRESS
    assert engine.cuStreamQuery(other) == ILLEGAL_ADDRESS
    assert becomes(1, lambda: len(elsewhere.released))  # dropped though nothing rang its bell
    assert becomes(1, lambda: len(after.released))
    assert after.stepped == []
    refused = item()
    assert refused.submit(other) == ILLEGAL_ADDRESS
    assert refused.released == []
    assert engine.library.host_device_status(3) == ILLEGAL_ADDRESS
    engine.must("cuDevicePrimaryCtxRelease_v2", 3)
    engine.must("cuCtxSetCurrent", None)


def test_who_steps_what(engine, temper, make, item):
    """In quick a small item is its launcher's, a big one the worker's; in gpulike all are."""
    me = threading.get_native_id()
    for how, mine in (
        ({}, True),
        ({"nbytes": POLL_BYTES}, True),
        ({"nbytes": POLL_BYTES + 1}, False),
        ({"kind": HOST_FUNCTION}, False),
    ):
        stream, one = make.stream(), item(**how)
        one.go = True
        one.submit(stream)
        assert becomes(1, lambda one=one: len(one.released))
        assert (set(one.stepped) == {me}) == (mine and temper == "quick")


def test_quick_a_waiter_steps_what_a_poller_leaves(engine, make, item):
    engine.set("temper", "quick")
    stream, big = make.stream(), item(nbytes=POLL_BYTES + 1)
    big.submit(stream)
    assert engine.cuStreamQuery(stream) == NOT_READY
    big.ring()
    engine.must("cuStreamSynchronize", stream)
    assert len(big.released) == 1


def test_gpulike_a_kernel_starts_after_a_random_delay(engine, make, item):
    engine.set("temper", "gpulike")
    engine.set("read_delay_us", "20000")
    stream, delays = make.stream(), []
    for _ in range(12):
        one = item()
        one.go = True
        begun = time.monotonic()
        one.submit(stream)
        engine.must("cuStreamSynchronize", stream)
        delays.append(one.times[0] - begun)
    assert max(delays) - min(delays) > 0.005
    mark = item(kind=MARK)
    mark.go = True
    begun = time.monotonic()
    mark.submit(stream)
    engine.must("cuStreamSynchronize", stream)
    assert mark.times[0] - begun < max(delays)


def test_gpulike_one_collective_at_a_time(engine, make, item):
    engine.set("temper", "gpulike")
    engine.set("read_delay_us", "0")
    streams = [make.stream() for _ in range(3)]
    kernels = [item(turn=True) for _ in streams]
    for stream, kernel in zip(streams, kernels, strict=True):
        kernel.submit(stream)
        assert becomes(True, lambda kernel=kernel: bool(kernel.stepped))
    for kernel in kernels[1:]:
        kernel.ring()
    time.sleep(0.05)
    assert [len(kernel.released) for kernel in kernels] == [0, 0, 0]  # the first one's turn
    kernels[0].ring()
    for stream in streams:
        engine.must("cuStreamSynchronize", stream)
    assert [len(kernel.released) for kernel in kernels] == [1, 1, 1]


def test_gpulike_the_turn_goes_on_when_a_context_dies(engine, temper, item):
    engine.set("temper", "gpulike")
    for _ in range(2):  # what held the turn, or stood in line, is gone at the second time
        engine.must("cuCtxSetCurrent", engine.made("cuDevicePrimaryCtxRetain", 2))
        streams = [engine.stream() for _ in range(2)]
        kernels = [item(turn=True) for _ in streams]
        for stream, kernel in zip(streams, kernels, strict=True):
            kernel.submit(stream)
            assert becomes(True, lambda kernel=kernel: bool(kernel.stepped))
        engine.must("cuDevicePrimaryCtxRelease_v2", 2)
        assert [len(kernel.released) for kernel in kernels] == [1, 1]
    engine.must("cuCtxSetCurrent", None)


def test_quick_every_collective_may_run(engine, make, item):
    engine.set("temper", "quick")
    first, second = item(turn=True), item(turn=True)
    first.submit(make.stream())
    second.go = True
    second.submit(make.stream())
    assert len(second.released) == 1


def test_following_a_stream(engine, make, item):
    ahead, behind = make.stream(), make.stream()
    one, two = item(), item()
    one.submit(ahead)
    follow = engine.library.host_stream_follow
    assert follow(ctypes.c_void_p(behind), ctypes.c_void_p(ahead)) == SUCCESS
    two.go = True
    two.submit(behind)
    time.sleep(0.01)
    assert two.stepped == []
    one.ring()
    engine.must("cuStreamSynchronize", behind)
    assert len(two.released) == 1


def test_the_current_device_as_the_runtime_has_it(engine, temper):
    library, device = engine.library, ctypes.c_int(-1)

    def elsewhere() -> list[int]:
        codes = [library.host_current_device(ctypes.byref(device), ctypes.c_bool(False))]
        codes.append(library.host_set_current_device(7))
        codes.append(library.host_current_device(ctypes.byref(device), ctypes.c_bool(False)))
        codes.append(device.value)
        codes.append(library.host_set_current_device(-1))
        codes.append(engine.cuCtxSynchronize())
        codes.append(library.host_set_current_device(99))
        codes.append(library.host_current_device(ctypes.byref(device), ctypes.c_bool(True)))
        codes.append(device.value)
        return codes

    answers = []
    thread = threading.Thread(target=lambda: answers.append(elsewhere()))
    thread.start()
    thread.join()
    assert answers == [[INVALID_CONTEXT, 0, 0, 7, 0, INVALID_CONTEXT, 101, 0, 0]]


def test_adopted_memory_counts_as_the_devices(engine, context):
    library, ordinal = engine.library, ctypes.c_int(-1)
    segment = ctypes.create_string_buffer(4096)
    base = ctypes.addressof(segment)
    find = engine.cuPointerGetAttribute
    assert library.host_memory_adopt(0, ctypes.c_void_p(base), ctypes.c_size_t(4096)) == SUCCESS
    assert find(ctypes.byref(ordinal), 9, base + 4095) == SUCCESS
    assert engine.cuMemFree_v2(base) == hostlib.INVALID_VALUE  # it is not the driver's to free
    library.host_memory_forget(ctypes.c_void_p(base))
    assert find(ctypes.byref(ordinal), 9, base) == hostlib.INVALID_VALUE


def test_bells_time_out_and_are_not_missed(engine):
    library, bell = engine.library, Bell()
    wait = library.host_bell_wait
    begun = time.monotonic()
    wait(ctypes.byref(bell), ctypes.c_uint32(0), ctypes.c_int64(30_000_000))
    assert 0.029 < time.monotonic() - begun < 1
    wait(ctypes.byref(bell), ctypes.c_uint32(1), ctypes.c_int64(-1))  # it differs already
    timer = threading.Timer(0.05, lambda: library.host_bell_ring(ctypes.byref(bell)))
    timer.start()
    while bell.rung == 0:
        wait(ctypes.byref(bell), ctypes.c_uint32(0), ctypes.c_int64(-1))
    assert (bell.rung, bell.sleepers) == (1, 0)
