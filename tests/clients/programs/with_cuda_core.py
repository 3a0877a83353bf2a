"""A program on cuda.core alone: devices, streams, events, buffers, timing. DEVICES."""

from __future__ import annotations

import ctypes
import sys
import time

import cuda.core as cc
from cuda.bindings import driver

device_count = int(sys.argv[1])
devices = cc.Device.get_all_devices()
assert len(devices) == device_count
assert len({device.uuid for device in devices}) == device_count
print("devices", *(device.name for device in devices), sep="; ")

device = cc.Device(device_count - 1)
device.set_current()
assert cc.Device().device_id == device.device_id
assert tuple(device.compute_capability) == (0, 0)  # there is no GPU that runs kernels
stream, other = device.create_stream(), device.create_stream()
assert stream.device.device_id == device.device_id
assert stream.__cuda_stream__() == (0, int(stream.handle))
print("streams")


def content(buffer: cc.Buffer) -> bytes:
    return ctypes.string_at(int(buffer.handle), buffer.size)


pinned = cc.LegacyPinnedMemoryResource()
first, second = (pinned.allocate(1000, stream=stream) for _ in range(2))
memory = device.allocate(1000, stream=stream)  # from the device's pool, in stream order
assert memory.is_device_accessible
assert memory.device_id == device.device_id
ctypes.memmove(int(first.handle), bytes(range(250)) * 4, 1000)
memory.copy_from(first, stream=stream)
memory.copy_to(second, stream=stream)
stream.sync()
assert content(second) == bytes(range(250)) * 4
memory.fill(7, stream=stream)
memory.copy_to(second, stream=stream)
stream.sync()
assert content(second) == b"\x07" * 1000
memory.close(stream)
stream.sync()
assert device.memory_resource.attributes.used_mem_current == 0
print("buffers")

synchronous = cc.DeviceMemoryResource(device)
scratch = synchronous.allocate(64, stream=stream)
scratch.close(stream)
host = cc.PinnedMemoryResource().allocate(64, stream=stream)
assert host.is_host_accessible
host.close(stream)
print("memory resources")

gate = device.allocate(4, stream=stream)
gate.fill(0, stream=stream)
stream.sync()
options = cc.EventOptions(timing_enabled=True)
begin = stream.record(options=options)
(code,) = driver.cuStreamWaitValue32(int(stream.handle), int(gate.handle), 1, 0)
assert code == 0, code
end = stream.record(options=options)
other.wait(end)
after = other.record()
assert not end.is_done
assert not after.is_done
time.sleep(0.1)
ctypes.c_uint32.from_address(int(gate.handle)).value = 1
after.sync()
assert end.is_done
assert 45 < end - begin < 5000, end - begin
print("events and timing")
stream.close()
other.close()
