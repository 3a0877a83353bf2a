"""A stream that the binding did not make, as another library has one, with host functions."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from pynccl import _engines

NON_BLOCKING = 1
GLOBAL, THREAD_LOCAL = 0, 1  # modes of a capture
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def driver() -> ctypes.CDLL:
    """The host engine, as the library of a CUDA driver."""
    path = _engines.engine("host").path("cuInit")
    assert path is not None
    return ctypes.CDLL(path)


class ForeignStream:
    """A stream on a virtual device of the host engine, for the length of a block."""

    def __init__(self, device: int = 0) -> None:
        self.driver = driver()
        self._device = device
        self._handle = ctypes.c_void_p()
        self._context = ctypes.c_void_p()
        self._functions: list[object] = []

    def must(self, name: str, *arguments: object) -> None:
        """Call a function of the driver, which must succeed."""
        result = getattr(self.driver, name)(*arguments)
        assert result == 0, f"{name} returned {result}"

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current, and put back what was."""
        before = ctypes.c_void_p()
        self.must("cuCtxGetCurrent", ctypes.byref(before))
        self.must("cuCtxSetCurrent", self._context)
        try:
            yield
        finally:
            self.must("cuCtxSetCurrent", before)

    def __enter__(self) -> ForeignStream:
        self.must("cuInit", 0)
        self.must("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        with self.current():
            made = ctypes.byref(self._handle)
            self.must("cuStreamCreateWithPriority", made, NON_BLOCKING, 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.synchronize()
        with self.current():
            self.must("cuStreamDestroy_v2", self._handle)
        self.must("cuDevicePrimaryCtxRelease_v2", self._device)

    @property
    def handle(self) -> int:
        """The raw CUstream."""
        return self._handle.value or 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def launch(self, function: Callable[[], object]) -> threading.Event:
        """Put a host function on the stream; the event is set when it has run."""
        ran = threading.Event()

        def call(_: object) -> None:
            function()
            ran.set()

        kept = HostFunction(call)
        self._functions.append(kept)
        with self.current():
            self.must("cuLaunchHostFunc", self._handle, kept, None)
        return ran

    def synchronize(self) -> None:
        """Wait until everything on the stream has run."""
        with self.current():
            self.must("cuStreamSynchronize", self._handle)


class Capture:
    """A capture of a foreign stream; `code` is what its end said."""

    def __init__(self, stream: ForeignStream) -> None:
        self.stream = stream
        self.code = -1

    @contextlib.contextmanager
    def going_on(self, mode: int) -> Iterator[None]:
        handle, graph = ctypes.c_void_p(self.stream.handle), ctypes.c_void_p()
        with self.stream.current():
            self.stream.must("cuStreamBeginCapture_v2", handle, mode)
        try:
            yield
        finally:
            with self.stream.current():
                self.code = self.stream.driver.cuStreamEndCapture(handle, ctypes.byref(graph))
            if graph:
                self.stream.must("cuGraphDestroy", graph)
