"""Fixtures of the host engine's tests: the library, both tempers, a context without leaks."""

from __future__ import annotations

import ctypes
import shutil
import time

import hostlib
import pytest

SETTINGS = ("launch_cost_us", "launch_depth", "read_delay_us")


@pytest.fixture(scope="session")
def engine(tmp_path_factory, watch_misuse):
    """Load the engine into the test process and initialise it.

    It is a copy of the object, so an instance of its own: these tests reset devices and count
    what lives on them, and pynccl, where its tests run in the same process, keeps things there.
    """
    path = tmp_path_factory.mktemp("engine") / hostlib.LIBRARY
    shutil.copyfile(hostlib.library_path(), path)
    loaded = hostlib.Engine(path)
    watch_misuse(loaded.library)
    loaded.must("cuInit", 0)
    return loaded


@pytest.fixture(params=["quick", "gpulike"])
def temper(request, engine):
    """Run once in each temper; settings, faults and the current context end with the test."""
    engine.set("temper", request.param)
    yield request.param
    engine.must("cuCtxSetCurrent", None)
    engine.set("faults", "")
    engine.set("temper", "quick")
    for key in SETTINGS:
        engine.set(key, "")
    for key, value in (("quirks", ""), ("pointers", "any"), ("launch_blocking", "0")):
        engine.set(key, value)


@pytest.fixture
def context(engine, temper):
    """Make device 0's primary context current; what the test makes must be gone at its end."""
    handle = engine.made("cuDevicePrimaryCtxRetain", 0)
    engine.must("cuCtxSetCurrent", handle)
    before = engine.live()
    yield handle
    engine.set("faults", "")
    kinds = ("streams", "events", "allocations", "work_items")
    left = before
    for _ in range(200):
        left = engine.live()
        if all(left[kind] == before[kind] for kind in kinds):
            break
        time.sleep(0.01)
    engine.must("cuDevicePrimaryCtxRelease_v2", 0)
    engine.must("cuCtxSetCurrent", None)
    assert {kind: left[kind] for kind in kinds} == {kind: before[kind] for kind in kinds}


class Toolbox:
    """Makes objects of the current context and frees them when the test ends."""

    def __init__(self, engine: hostlib.Engine) -> None:
        self.engine = engine
        self._made: list[tuple[str, int]] = []

    def stream(self, flags: int = hostlib.NON_BLOCKING) -> int:
        return self._keep("cuStreamDestroy_v2", self.engine.stream(flags))

    def event(self, flags: int = hostlib.DISABLE_TIMING) -> int:
        return self._keep("cuEventDestroy_v2", self.engine.event(flags))

    def memory(self, nbytes: int) -> int:
        return self._keep("cuMemFree_v2", self.engine.allocate(nbytes))

    def word(self) -> ctypes.c_uint32:
        """Allocate a word, 0, that a stream can wait for and the host can write."""
        word = ctypes.c_uint32.from_address(self.memory(4))
        word.value = 0
        return word

    def gate(self, stream: int) -> ctypes.c_uint32:
        """Hold the stream until the word that is returned becomes 1."""
        word = self.word()
        address = ctypes.addressof(word)
        self.engine.must("cuStreamWaitValue32_v2", stream, address, 1, 0)
        return word

    def close(self) -> None:
        for destroy, handle in reversed(self._made):
            getattr(self.engine, destroy)(handle)

    def _keep(self, destroy: str, handle: int) -> int:
        self._made.append((destroy, handle))
        return handle


@pytest.fixture
def make(engine, context):
    """Make streams, events and memory; see Toolbox."""
    toolbox = Toolbox(engine)
    yield toolbox
    toolbox.close()
