"""The driver's half of the host engine: devices, contexts, handles, memory, sticky errors."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import hostlib
import pytest
from hostlib import (
    CONTEXT_IS_DESTROYED,
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_INITIALIZED,
    NOT_PERMITTED,
    NOT_READY,
    SUCCESS,
)


def run_alone(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with `engine` made, in a process of its own."""
    prelude = f"import sys; sys.path.insert(0, {str(Path(hostlib.__file__).parent)!r})\n"
    prelude += "import ctypes, hostlib; engine = hostlib.Engine()\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(program)],
        env={
            **os.environ,
            "PYNCCL_HOST_LIBRARY": str(hostlib.library_path()),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def in_thread(function):
    """Call it on a thread of its own, which has no current context."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(function()))
    thread.start()
    thread.join()
    return answers[0]


# ---- initialisation and contexts


def test_before_init_everything_is_refused():
    done = run_alone("""
        out = ctypes.c_void_p()
        print(engine.cuDeviceGetCount(ctypes.byref(out)),
              engine.cuCtxGetCurrent(ctypes.byref(out)),
              engine.cuStreamQuery(None), engine.cuEventCreate(ctypes.byref(out), 0),
              engine.cuInit(1), engine.cuInit(0), engine.cuStreamQuery(None))
    """)
    codes = [NOT_INITIALIZED] * 4 + [INVALID_VALUE, SUCCESS, INVALID_CONTEXT]
    assert done.stdout.split() == [str(code) for code in codes], done.stderr


def test_the_environment_sets_the_devices_and_names_what_it_does_not_understand():
    done = run_alone(
        """
        engine.must("cuInit", 0)
        count = ctypes.c_int()
        engine.must("cuDeviceGetCount", ctypes.byref(count))
        print(count.value)
        """,
        PYNCCL_HOST_DEVICES="3",
        PYNCCL_HOST_TEMPER="sluggish",
        PYNCCL_HOST_FAULTS="call:explode",
    )
    assert done.stdout.split() == ["3"]
    assert "PYNCCL_HOST_TEMPER=sluggish" in done.stderr
    assert "PYNCCL_HOST_FAULTS=call:explode" in done.stderr


def test_a_forked_child_is_refused():
    done = run_alone("""
        import os
        engine.must("cuInit", 0)
        engine.must("cuCtxSetCurrent", engine.made("cuDevicePrimaryCtxRetain", 0))
        child = os.fork()
        if child == 0:
            codes = engine.cuStreamQuery(None), engine.cuInit(0)
            os._exit(0 if codes == (3, 3) else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), engine.cuStreamQuery(None))
    """)
    assert done.stdout.split() == ["0", "0"], done.stderr


def test_calls_need_a_current_context(engine, context):
    stream, event = engine.stream(), engine.event()
    out = ctypes.c_void_p()
    calls = {
        "cuStreamQuery": (stream,),
        "cuEventQuery": (event,),
        "cuEventRecord": (event, stream),
        "cuCtxSynchronize": (),
        "cuStreamCreateWithPriority": (ctypes.byref(out), 0, 0),
        "cuMemAlloc_v2": (ctypes.byref(out), 64),
    }
    for name, arguments in calls.items():
        assert in_thread(lambda n=name, a=arguments: getattr(engine, n)(*a)) == INVALID_CONTEXT
    assert engine.made("cuCtxGetCurrent") == context
    assert in_thread(lambda: engine.made("cuCtxGetCurrent")) == 0
    engine.must("cuStreamDestroy_v2", stream)
    engine.must("cuEventDestroy_v2", event)


def test_a_primary_context_lives_while_it_is_retained(engine, temper):
    handle = engine.made("cuDevicePrimaryCtxRetain", 5)
    assert engine.made("cuDevicePrimaryCtxRetain", 5) == handle
    engine.must("cuCtxSetCurrent", handle)
    assert engine.made("cuCtxGetDevice", kind=ctypes.c_int) == 5
    stream, event, memory = engine.stream(), engine.event(), engine.allocate(4096)
    engine.must("cuDevicePrimaryCtxRelease_v2", 5)
    engine.must("cuMemsetD8Async", memory, 1, 4096, stream)
    engine.must("cuStreamSynchronize", stream)
    engine.must("cuDevicePrimaryCtxRelease_v2", 5)
    assert engine.cuDevicePrimaryCtxRelease_v2(5) == INVALID_CONTEXT
    assert engine.cuStreamQuery(stream) == CONTEXT_IS_DESTROYED
    assert engine.cuCtxSetCurrent(handle) == INVALID_CONTEXT

    assert engine.made("cuDevicePrimaryCtxRetain", 5) == handle  # begun anew: all is gone
    engine.must("cuCtxSetCurrent", handle)
    assert engine.cuStreamQuery(stream) == INVALID_HANDLE
    assert engine.cuEventQuery(event) == INVALID_HANDLE
    assert engine.cuMemFree_v2(memory) == INVALID_VALUE
    engine.must("cuDevicePrimaryCtxRelease_v2", 5)
    engine.must("cuCtxSetCurrent", None)


def test_the_end_of_a_context_drops_stuck_work(engine, temper):
    engine.must("cuCtxSetCurrent", engine.made("cuDevicePrimaryCtxRetain", 6))
    stream, word = engine.stream(), engine.allocate(4)
    ctypes.memset(word, 0, 4)
    engine.must("cuStreamWaitValue32_v2", stream, word, 1, 0)
    engine.must("cuMemsetD8Async", word, 9, 4, stream)
    engine.must("cuDevicePrimaryCtxRelease_v2", 6)
    engine.must("cuCtxSetCurrent", None)
    assert engine.live()["work_items"] == 0


def test_devices_differ(engine):
    def text(function: str, device: int, size: int) -> bytes:
        out = ctypes.create_string_buffer(size)
        engine.must(function, *((out, size) if size != 16 else (out,)), device)
        return out.raw

    for function, size in (
        ("cuDeviceGetPCIBusId", 32),
        ("cuDeviceGetUuid_v2", 16),
        ("cuDeviceGetName", 64),
    ):
        assert len({text(function, device, size) for device in range(8)}) == 8
    assert engine.cuDeviceGet(ctypes.byref(ctypes.c_int()), 8) == 101


def test_errors_have_names(engine):
    assert engine.error_name(NOT_READY) == "CUDA_ERROR_NOT_READY"
    text = ctypes.c_char_p()
    assert engine.cuGetErrorName(123456, ctypes.byref(text)) == INVALID_VALUE
    assert text.value is None
    engine.must("cuGetErrorString", ILLEGAL_ADDRESS, ctypes.byref(text))
    assert text.value == b"an illegal memory access was encountered"


# ---- handles


def test_dead_and_foreign_handles_are_refused(engine, context, make):
    stream, event = engine.stream(), engine.event()
    other = make.stream()
    engine.must("cuEventRecord", event, stream)
    engine.must("cuEventDestroy_v2", event)
    engine.must("cuStreamDestroy_v2", stream)
    for _ in range(50):  # neither comes back to life while others are made
        make.stream()
        make.event()
    assert engine.cuStreamQuery(stream) == INVALID_HANDLE
    assert engine.cuStreamDestroy_v2(stream) == INVALID_HANDLE
    assert engine.cuEventQuery(event) == INVALID_HANDLE
    assert engine.cuEventDestroy_v2(event) == INVALID_HANDLE
    assert engine.cuStreamWaitEvent(other, event, 0) == INVALID_HANDLE
    for wild in (3, 0x1234, other + 8, other + (1 << 30), (1 << 64) - 1):
        assert engine.cuStreamQuery(wild) == INVALID_HANDLE
        assert engine.cuEventQuery(wild) == INVALID_HANDLE
    assert engine.cuStreamDestroy_v2(hostlib.LEGACY) == INVALID_HANDLE


def test_stream_ids_are_never_reused(engine, context):
    seen = set()
    for _ in range(600):  # more than the slots that lie unused before one is used again
        stream = engine.stream()
        identity = ctypes.c_ulonglong()
        engine.must("cuStreamGetId", stream, ctypes.byref(identity))
        engine.must("cuStreamDestroy_v2", stream)
        seen.add(identity.value)
    assert len(seen) == 600


def test_special_streams(engine, context):
    def identity(handle) -> int:
        out = ctypes.c_ulonglong()
        engine.must("cuStreamGetId", handle, ctypes.byref(out))
        return out.value

    def identity_in_thread() -> int:
        engine.must("cuCtxSetCurrent", context)
        return identity(hostlib.PER_THREAD)

    assert identity(None) == identity(hostlib.LEGACY)
    assert identity(hostlib.PER_THREAD) == identity(hostlib.PER_THREAD) != identity(None)
    assert in_thread(identity_in_thread) not in (
        identity(hostlib.PER_THREAD),
        identity(None),
    )


def test_stream_and_event_must_share_a_context(engine, context, make):
    event = make.event()
    there = engine.made("cuDevicePrimaryCtxRetain", 1)
    engine.must("cuCtxSetCurrent", there)
    stream = engine.stream()
    assert engine.cuEventRecord(event, stream) == INVALID_HANDLE
    engine.must("cuStreamWaitEvent", stream, event, 0)  # waiting across devices is fine
    owner = ctypes.c_void_p()
    engine.must("cuStreamGetCtx", stream, ctypes.byref(owner))
    assert owner.value == there != context
    engine.must("cuStreamDestroy_v2", stream)
    engine.must("cuCtxSetCurrent", context)
    engine.must("cuDevicePrimaryCtxRelease_v2", 1)


def test_the_capture_mode_is_the_threads_own(engine, context):
    mode = ctypes.c_int(2)
    engine.must("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == 0
    there = ctypes.c_int(1)
    assert in_thread(lambda: engine.cuThreadExchangeStreamCaptureMode(ctypes.byref(there))) == 0
    assert there.value == 0
    engine.must("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == 2


# ---- memory


def test_memory_is_found_from_inside_and_not_from_outside(engine, context, make):
    nbytes = 10_000
    memory = make.memory(nbytes)
    kind, ordinal = ctypes.c_uint(), ctypes.c_int(-1)
    for inside in (memory, memory + nbytes - 1):
        engine.must("cuPointerGetAttribute", ctypes.byref(kind), 2, inside)
        engine.must("cuPointerGetAttribute", ctypes.byref(ordinal), 9, inside)
        assert (kind.value, ordinal.value) == (2, 0)
    for outside in (memory - 1, memory + nbytes, ctypes.addressof(kind)):
        assert engine.cuPointerGetAttribute(ctypes.byref(kind), 2, outside) == INVALID_VALUE
    pinned = engine.made("cuMemHostAlloc", 4096, 3)
    engine.must("cuPointerGetAttribute", ctypes.byref(kind), 2, pinned)
    assert kind.value == 1
    same = engine.made("cuMemHostGetDevicePointer_v2", pinned, 0, kind=ctypes.c_ulonglong)
    assert same == pinned
    assert engine.cuMemFree_v2(pinned) == INVALID_VALUE
    engine.must("cuMemFreeHost", pinned)
    assert engine.cuMemFreeHost(pinned) == INVALID_VALUE


@pytest.mark.parametrize("nbytes", [512, 8192, 100_001])
@pytest.mark.parametrize("where", ["below", "above"])
def test_guard_pages_catch_what_runs_over(nbytes, where):
    # 512 bytes is the alignment: so much may lie unused before the upper guard
    at = {"below": -4096, "above": nbytes + 511}[where]
    done = run_alone(f"""
        engine.must("cuInit", 0)
        engine.must("cuCtxSetCurrent", engine.made("cuDevicePrimaryCtxRetain", 0))
        memory = engine.allocate({nbytes})
        ctypes.memset(memory, 1, {nbytes})
        print("inside", flush=True)
        ctypes.memset(memory + {at}, 1, 1)
    """)
    assert done.stdout.split() == ["inside"]
    assert done.returncode == -signal.SIGSEGV


def test_freed_memory_is_unmapped():
    done = run_alone("""
        engine.must("cuInit", 0)
        engine.must("cuCtxSetCurrent", engine.made("cuDevicePrimaryCtxRetain", 0))
        memory = engine.allocate(512)
        engine.must("cuMemFree_v2", memory)
        print("freed", flush=True)
        ctypes.memset(memory, 1, 1)
    """)
    assert done.stdout.split() == ["freed"]
    assert done.returncode == -signal.SIGSEGV


def test_copies_past_the_end_are_refused(engine, context, make):
    stream, memory = make.stream(), make.memory(1000)
    here = ctypes.create_string_buffer(2000)
    assert engine.cuMemcpyDtoHAsync_v2(here, memory + 600, 401, stream) == INVALID_VALUE
    assert engine.cuMemsetD8Async(memory, 0, 1001, stream) == INVALID_VALUE
    assert engine.cuMemcpyHtoDAsync_v2(0, here, 4, stream) == INVALID_VALUE
    engine.must("cuMemcpyDtoHAsync_v2", here, memory + 600, 400, stream)
    engine.must("cuStreamSynchronize", stream)


def test_pointers_of_others_can_be_refused(engine, context, make):
    stream = make.stream()
    here = ctypes.create_string_buffer(64)
    engine.must("cuMemsetD8Async", ctypes.addressof(here), 1, 64, stream)
    engine.must("cuStreamSynchronize", stream)
    engine.set("pointers", "own")
    assert engine.cuMemsetD8Async(ctypes.addressof(here), 1, 64, stream) == INVALID_VALUE


@pytest.mark.parametrize("nbytes", [1, 16 * 1024, 3_000_001])
def test_bytes_go_there_and_back(engine, context, make, nbytes):
    stream, first, second = make.stream(), make.memory(nbytes), make.memory(nbytes)
    data = os.urandom(nbytes)
    back = ctypes.create_string_buffer(nbytes)
    engine.must("cuMemcpyHtoDAsync_v2", first, data, nbytes, stream)
    engine.must("cuMemcpyAsync", second, first, nbytes, stream)
    engine.must("cuMemsetD8Async", first, 0, nbytes, stream)
    engine.must("cuMemcpyDtoHAsync_v2", back, second, nbytes, stream)
    engine.must("cuStreamSynchronize", stream)
    assert back.raw == data


# ---- sticky errors


def test_an_error_sticks_until_the_context_ends(engine, temper):
    handle = engine.made("cuDevicePrimaryCtxRetain", 4)
    engine.must("cuCtxSetCurrent", handle)
    stream, other, event, memory = (
        engine.stream(),
        engine.stream(),
        engine.event(),
        engine.allocate(64),
    )
    engine.must("cuEventRecord", event, other)
    engine.must("cuEventSynchronize", event)
    engine.set("faults", "event:cuda_error=700,call=1")
    late = engine.event()
    engine.must("cuEventRecord", late, stream)
    assert engine.cuEventSynchronize(late) == ILLEGAL_ADDRESS
    assert engine.cuEventQuery(event) == ILLEGAL_ADDRESS  # also what was done before
    assert engine.cuStreamQuery(other) == ILLEGAL_ADDRESS
    assert engine.cuMemsetD8Async(memory, 0, 64, other) == ILLEGAL_ADDRESS
    assert engine.cuEventRecord(event, other) == ILLEGAL_ADDRESS
    assert engine.cuMemFree_v2(memory) == ILLEGAL_ADDRESS
    assert engine.cuCtxSynchronize() == ILLEGAL_ADDRESS
    assert engine.cuEventDestroy_v2(event) == ILLEGAL_ADDRESS
    assert engine.cuEventQuery(event) == INVALID_HANDLE  # destroyed all the same
    engine.must("cuDevicePrimaryCtxRelease_v2", 4)
    engine.must("cuCtxSetCurrent", engine.made("cuDevicePrimaryCtxRetain", 4))
    fresh = engine.stream()
    engine.must("cuStreamSynchronize", fresh)
    engine.must("cuDevicePrimaryCtxRelease_v2", 4)
    engine.must("cuCtxSetCurrent", None)


def test_an_error_ends_every_wait_and_skips_host_functions(engine, temper):
    handle = engine.made("cuDevicePrimaryCtxRetain", 4)
    engine.must("cuCtxSetCurrent", handle)
    stuck, bad = engine.stream(), engine.stream()
    word = engine.allocate(4)
    ctypes.memset(word, 0, 4)
    called = []
    function = hostlib.HostFunction(lambda _: called.append(1))
    engine.must("cuStreamWaitValue32_v2", stuck, word, 1, 0)
    engine.must("cuLaunchHostFunc", stuck, function, None)
    answers = []

    def wait() -> None:
        engine.must("cuCtxSetCurrent", handle)
        answers.append(engine.cuStreamSynchronize(stuck))

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    engine.set("faults", "event:cuda_error=719,call=1")
    event = engine.event()
    engine.must("cuEventRecord", event, bad)
    engine.cuEventSynchronize(event)
    waiter.join(1)
    assert answers == [719]
    engine.must("cuDevicePrimaryCtxRelease_v2", 4)
    engine.must("cuCtxSetCurrent", None)
    assert called == []
    assert engine.live()["work_items"] == 0


def test_a_host_function_may_not_call_the_driver(engine, context, make):
    stream = make.stream()
    codes = []
    function = hostlib.HostFunction(lambda _: codes.append(engine.cuStreamQuery(stream)))
    engine.must("cuLaunchHostFunc", stream, function, None)
    engine.must("cuStreamSynchronize", stream)
    assert codes == [NOT_PERMITTED]
