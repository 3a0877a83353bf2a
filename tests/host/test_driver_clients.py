"""What other programs ask of the driver: functions by name, pools, pointers, contexts."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import hostlib
import pytest
from hostlib import (
    INVALID_CONTEXT,
    INVALID_VALUE,
    NOT_READY,
    NOT_SUPPORTED,
)

NOT_FOUND, INVALID_DEVICE = 500, 101
FOUND, UNKNOWN, TOO_OLD = 0, 1, 2
PER_THREAD_STREAM = 2


# ---- functions by name


def look_up(engine, name, version, flags=0):
    """The address and the status of a look-up that the engine takes."""
    address, status = ctypes.c_void_p(7), ctypes.c_int(7)
    engine.must(
        "cuGetProcAddress_v2",
        name.encode(),
        ctypes.byref(address),
        version,
        flags,
        ctypes.byref(status),
    )
    return address.value or 0, status.value


def address_of(engine, name):
    return ctypes.cast(getattr(engine.library, name), ctypes.c_void_p).value


@pytest.mark.parametrize(
    ("name", "version", "form"),
    [
        ("cuInit", 2000, "cuInit"),
        ("cuMemAlloc", 3020, "cuMemAlloc_v2"),
        ("cuMemAlloc", 13000, "cuMemAlloc_v2"),
        ("cuCtxGetDevice", 12090, "cuCtxGetDevice"),
        ("cuCtxGetDevice", 13000, "cuCtxGetDevice_v2"),
        ("cuStreamGetCaptureInfo", 12000, "cuStreamGetCaptureInfo_v2"),
        ("cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"),
        ("cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"),
        ("cuGetProcAddress", 12000, "cuGetProcAddress_v2"),
        ("cuDeviceGetUuid", 9020, "cuDeviceGetUuid_v2"),
    ],
)
def test_a_look_up_gives_the_newest_form_that_the_caller_knows(engine, name, version, form):
    assert look_up(engine, name, version) == (address_of(engine, form), FOUND)


def test_names_of_other_libraries_do_not_get_in_between():
    """As JAX has it: its library brings global functions with the names of the driver's."""
    script = """
import ctypes, hostlib
path = hostlib.library_path().with_name("libpynccl_noop.so")
other = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
engine = hostlib.Engine()
def at(library): return ctypes.cast(library.cuInit, ctypes.c_void_p).value
assert at(other) != at(engine.library)
engine.must("cuInit", 0)
found = ctypes.c_void_p()
engine.must("cuGetProcAddress_v2", b"cuInit", ctypes.byref(found), 12000, 0, None)
assert found.value == at(engine.library), "it is the other library's"
"""
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, check=True)


def test_look_ups_that_find_nothing(engine):
    assert look_up(engine, "cuMemAlloc", 3010) == (0, TOO_OLD)
    assert look_up(engine, "cuStreamBeginCapture", 10000) == (0, TOO_OLD)
    assert look_up(engine, "cuModuleLoad", 13000) == (0, UNKNOWN)
    assert look_up(engine, "cuMem", 13000) == (0, UNKNOWN)
    address = ctypes.c_void_p()
    for name, version, flags in (
        (b"cuInit", 99000, 0),
        (None, 12000, 0),
        (b"cuInit", 12000, 8),
    ):
        code = engine.cuGetProcAddress_v2(name, ctypes.byref(address), version, flags, None)
        assert code == INVALID_VALUE


def test_what_belongs_to_no_public_interface_is_refused(engine):
    address = ctypes.c_void_p(7)
    code = engine.cuGetProcAddress_v2(
        b"cuMemcpyAsync", ctypes.byref(address), 12000, PER_THREAD_STREAM, None
    )
    assert code == NOT_SUPPORTED
    identity = (ctypes.c_char * 16)()
    assert engine.cuGetExportTable(ctypes.byref(address), identity) == NOT_FOUND
    assert address.value is None


# ---- contexts and devices


def test_pushed_contexts_come_back_in_order(engine, context):
    there = engine.made("cuDevicePrimaryCtxRetain", 1)
    out = ctypes.c_void_p()
    engine.must("cuCtxPushCurrent_v2", there)
    assert engine.made("cuCtxGetCurrent") == there
    engine.must("cuCtxPopCurrent_v2", ctypes.byref(out))
    assert out.value == there
    assert engine.made("cuCtxGetCurrent") == context
    for _ in range(16):
        engine.must("cuCtxPushCurrent_v2", there)
    assert engine.cuCtxPushCurrent_v2(there) == 2  # out of memory: the engine keeps 16
    for _ in range(16):
        engine.must("cuCtxPopCurrent_v2", None)
    engine.must("cuCtxPopCurrent_v2", None)
    assert engine.cuCtxPopCurrent_v2(None) == INVALID_CONTEXT
    assert engine.cuCtxPushCurrent_v2(None) == INVALID_CONTEXT
    engine.must("cuCtxSetCurrent", context)
    engine.must("cuDevicePrimaryCtxRelease_v2", 1)


def test_what_a_context_says_of_itself(engine, context):
    number, device = ctypes.c_ulonglong(), ctypes.c_int(-1)
    engine.must("cuCtxGetId", context, ctypes.byref(number))
    engine.must("cuCtxGetDevice_v2", ctypes.byref(device), context)
    assert (number.value > 0, device.value) == (True, 0)
    engine.must("cuCtxSynchronize_v2", context)
    flags, active = ctypes.c_uint(7), ctypes.c_int(7)
    for ordinal, alive in ((0, 1), (3, 0)):
        engine.must(
            "cuDevicePrimaryCtxGetState", ordinal, ctypes.byref(flags), ctypes.byref(active)
        )
        assert (flags.value, active.value) == (0, alive)
    again = engine.made("cuDevicePrimaryCtxRetain", 3)
    first, second = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    engine.must("cuCtxGetId", again, ctypes.byref(first))
    engine.must("cuDevicePrimaryCtxRelease_v2", 3)
    assert engine.cuCtxGetId(again, ctypes.byref(second)) == INVALID_CONTEXT
    again = engine.made("cuDevicePrimaryCtxRetain", 3)
    engine.must("cuCtxGetId", again, ctypes.byref(second))
    engine.must("cuDevicePrimaryCtxRelease_v2", 3)
    assert second.value > first.value


def test_devices_are_found_by_their_place_on_the_bus(engine):
    for ordinal in (0, 5):
        text = ctypes.create_string_buffer(32)
        engine.must("cuDeviceGetPCIBusId", text, 32, ordinal)
        assert engine.made("cuDeviceGetByPCIBusId", text.value, kind=ctypes.c_int) == ordinal
    found = ctypes.c_int()
    assert engine.cuDeviceGetByPCIBusId(ctypes.byref(found), b"0000:7f:00.0") == INVALID_DEVICE
    assert engine.cuDeviceGetByPCIBusId(ctypes.byref(found), b"there") == INVALID_VALUE


def test_a_device_reaches_no_other_and_has_memory(engine, context):
    answer, total, free = ctypes.c_int(7), ctypes.c_size_t(), ctypes.c_size_t()
    engine.must("cuDeviceCanAccessPeer", ctypes.byref(answer), 0, 1)
    engine.must("cuDeviceTotalMem_v2", ctypes.byref(total), 0)
    assert answer.value == 0
    whole = total.value
    engine.must("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    assert 0 < free.value <= total.value == whole


def test_what_a_stream_says_of_itself(engine, context):
    for flags in (0, hostlib.NON_BLOCKING):
        stream = engine.made("cuStreamCreate", flags)
        for name, value in (("Flags", flags), ("Priority", 0), ("Device", 0)):
            out = ctypes.c_int(7)
            engine.must(f"cuStreamGet{name}", stream, ctypes.byref(out))
            assert out.value == value
        owner, green = ctypes.c_void_p(), ctypes.c_void_p(7)
        engine.must("cuStreamGetCtx_v2", stream, ctypes.byref(owner), ctypes.byref(green))
        assert (owner.value, green.value) == (context, None)
        engine.must("cuStreamDestroy_v2", stream)


# ---- memory


def attributes(engine, pointer, *wanted):
    """The attributes of a pointer by cuPointerGetAttributes, each in eight bytes."""
    values = (ctypes.c_uint64 * len(wanted))()
    places = (ctypes.c_void_p * len(wanted))(
        *(ctypes.addressof(values) + 8 * i for i in range(len(wanted)))
    )
    engine.must(
        "cuPointerGetAttributes",
        len(wanted),
        (ctypes.c_int * len(wanted))(*wanted),
        places,
        pointer,
    )
    return list(values)


def test_the_attributes_of_a_pointer(engine, context, make):
    memory = make.memory(1000)
    inside = memory + 10
    assert attributes(engine, inside, 1, 2, 3, 4, 8, 9, 11, 12, 13, 17) == [
        context, 2, inside, 0, 0, 0, memory, 1000, 1, 0,
    ]  # fmt: skip
    pinned = engine.made("cuMemAllocHost_v2", 100)
    assert attributes(engine, pinned, 2, 4) == [1, pinned]
    engine.must("cuMemFreeHost", pinned)
    foreign = ctypes.create_string_buffer(8)
    assert attributes(engine, ctypes.addressof(foreign), 1, 2, 11, 13) == [0] * 4
    base, size = ctypes.c_ulonglong(), ctypes.c_size_t()
    engine.must("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), inside)
    assert (base.value, size.value) == (memory, 1000)
    outside = ctypes.addressof(foreign)
    assert engine.cuMemGetAddressRange_v2(None, None, outside) == NOT_FOUND
    value = ctypes.c_uint64()
    assert engine.cuPointerGetAttribute(ctypes.byref(value), 5, memory) == INVALID_VALUE


def test_copies_and_fills_that_wait(engine, context, make):
    one, two = make.memory(64), make.memory(64)
    text = ctypes.create_string_buffer(b"0123456789abcdef", 16)
    back = ctypes.create_string_buffer(16)
    engine.must("cuMemcpyHtoD_v2", one, text, 16)
    engine.must("cuMemcpyDtoD_v2", two, one, 16)
    engine.must("cuMemsetD16_v2", two, 0x4142, 2)
    engine.must("cuMemsetD8_v2", two + 4, 0x43, 1)
    engine.must("cuMemcpyDtoH_v2", back, two, 16)
    assert back.raw == b"BABAC56789abcdef"
    engine.must("cuMemcpy", ctypes.addressof(back), one, 16)
    assert back.raw == text.raw
    assert engine.cuMemsetD32_v2(one + 2, 1, 1) == INVALID_VALUE  # not aligned
    assert engine.cuMemsetD32_v2(one, 1, 17) == INVALID_VALUE  # too many
    assert engine.cuMemcpyDtoD_v2(one, two + 1, 64) == INVALID_VALUE
    stream = make.stream()
    gate = make.gate(stream)
    engine.must("cuMemcpyDtoDAsync_v2", two, one, 16, stream)
    assert engine.cuStreamQuery(stream) == NOT_READY
    gate.value = 1
    engine.must("cuStreamSynchronize", stream)
    assert ctypes.string_at(two, 16) == text.raw


# ---- pools


class Properties(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("place", ctypes.c_int),
        ("id", ctypes.c_int),
        ("security", ctypes.c_void_p),
        ("most", ctypes.c_size_t),
        ("rest", ctypes.c_char * 56),
    )


USED, USED_HIGH, THRESHOLD = 7, 8, 4


def counted(engine, pool, attribute):
    value = ctypes.c_uint64(7)
    engine.must("cuMemPoolGetAttribute", pool, attribute, ctypes.byref(value))
    return value.value


@pytest.mark.parametrize("own", [True, False])
def test_memory_of_a_pool_is_freed_in_the_order_of_the_stream(engine, context, make, own):
    stream = make.stream()
    if own:
        pool = engine.made("cuMemPoolCreate", ctypes.byref(Properties(type=1, place=1, id=0)))
        memory = engine.made(
            "cuMemAllocFromPoolAsync", 100, pool, stream, kind=ctypes.c_ulonglong
        )
    else:
        pool = engine.made("cuDeviceGetDefaultMemPool", 0)
        memory = engine.made("cuMemAllocAsync", 100, stream, kind=ctypes.c_ulonglong)
    before = counted(engine, pool, USED) - 100
    assert attributes(engine, memory, 17, 12) == [pool, 100]
    gate = make.gate(stream)
    engine.must("cuMemsetD8Async", memory, 1, 100, stream)
    engine.must("cuMemFreeAsync", memory, stream)
    assert counted(engine, pool, USED) == before + 100
    gate.value = 1
    engine.must("cuStreamSynchronize", stream)
    assert counted(engine, pool, USED) == before
    assert counted(engine, pool, USED_HIGH) >= 100
    assert engine.cuMemFreeAsync(memory, stream) == INVALID_VALUE
    if own:
        engine.must("cuMemPoolDestroy", pool)
        assert engine.cuMemPoolDestroy(pool) == INVALID_VALUE


def test_a_pool_that_is_destroyed_outlives_what_it_gave(engine, context, make):
    stream = make.stream()
    pool = engine.made("cuMemPoolCreate", ctypes.byref(Properties(type=1, place=2)))
    memory = engine.made("cuMemAllocFromPoolAsync", 8, pool, stream, kind=ctypes.c_ulonglong)
    assert attributes(engine, memory, 2) == [1]  # the host's
    engine.must("cuMemPoolDestroy", pool)
    ctypes.memset(memory, 1, 8)
    engine.must("cuMemFreeHost", memory)
    out = ctypes.c_ulonglong()
    code = engine.cuMemAllocFromPoolAsync(ctypes.byref(out), 8, pool, stream)
    assert code == INVALID_VALUE


def test_the_pool_that_a_device_takes_from(engine, context, make):
    stream = make.stream()
    pool = engine.made("cuMemPoolCreate", ctypes.byref(Properties(type=1, place=1, id=0)))
    engine.must("cuDeviceSetMemPool", 0, pool)
    assert engine.made("cuDeviceGetMemPool", 0) == pool
    assert engine.made("cuDeviceGetDefaultMemPool", 0) != pool
    memory = engine.made("cuMemAllocAsync", 8, stream, kind=ctypes.c_ulonglong)
    assert attributes(engine, memory, 17) == [pool]
    engine.must("cuMemFree_v2", memory)
    assert counted(engine, pool, USED) == 0
    assert engine.cuDeviceSetMemPool(1, pool) == INVALID_VALUE
    engine.must("cuMemPoolDestroy", pool)
    assert engine.made("cuDeviceGetMemPool", 0) == engine.made("cuDeviceGetDefaultMemPool", 0)


def test_what_a_pool_can_and_cannot_be(engine, context):
    out = ctypes.c_void_p()
    for wrong in (
        Properties(type=1, place=1, id=0, handles=1),
        Properties(type=1, place=3),
        Properties(type=1, place=1, id=0, most=1 << 20),
    ):
        code = engine.cuMemPoolCreate(ctypes.byref(out), ctypes.byref(wrong))
        assert code == NOT_SUPPORTED
    pool = engine.made("cuMemPoolCreate", ctypes.byref(Properties(type=1, place=1, id=0)))
    value = ctypes.c_uint64(1 << 40)
    engine.must("cuMemPoolSetAttribute", pool, THRESHOLD, ctypes.byref(value))
    assert counted(engine, pool, THRESHOLD) == 1 << 40
    assert engine.cuMemPoolSetAttribute(pool, USED, ctypes.byref(value)) == INVALID_VALUE
    assert engine.cuMemPoolGetAttribute(pool, 9, ctypes.byref(value)) == INVALID_VALUE
    flags = ctypes.c_int()
    for device, access in ((0, 3), (1, 0)):
        place = (ctypes.c_int * 2)(1, device)
        engine.must("cuMemPoolGetAccess", ctypes.byref(flags), pool, place)
        assert flags.value == access
    engine.must("cuMemPoolSetAccess", pool, (ctypes.c_int * 3)(1, 0, 3), 1)
    assert engine.cuMemPoolSetAccess(pool, (ctypes.c_int * 3)(1, 1, 3), 1) == NOT_SUPPORTED
    engine.must("cuMemPoolTrimTo", pool, 0)
    engine.must("cuMemPoolDestroy", pool)
    assert engine.cuMemPoolTrimTo(pool, 0) == INVALID_VALUE


def test_pools_go_with_their_context(engine, context):
    there = engine.made("cuDevicePrimaryCtxRetain", 2)
    engine.must("cuCtxSetCurrent", there)
    pool = engine.made("cuMemPoolCreate", ctypes.byref(Properties(type=1, place=1, id=2)))
    before = engine.live()["allocations"]
    engine.made("cuMemAllocFromPoolAsync", 8, pool, None, kind=ctypes.c_ulonglong)
    engine.must("cuCtxSetCurrent", context)
    engine.must("cuDevicePrimaryCtxRelease_v2", 2)
    assert engine.live()["allocations"] == before
    assert engine.cuMemPoolTrimTo(pool, 0) == INVALID_VALUE
