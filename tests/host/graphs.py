"""Captures and graphs by the C API, for tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hostlib

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NONE, ACTIVE, INVALIDATED = 0, 1, 2


def status(engine: hostlib.Engine, stream: int) -> int:
    """Whether the stream captures: NONE, ACTIVE or INVALIDATED."""
    found = ctypes.c_int(-1)
    engine.must("cuStreamIsCapturing", stream, ctypes.byref(found))
    return found.value


def begin(engine: hostlib.Engine, stream: int, mode: int = THREAD_LOCAL) -> None:
    engine.must("cuStreamBeginCapture_v2", stream, mode)


def end(engine: hostlib.Engine, stream: int) -> tuple[int, int]:
    """The result code of the end of a capture, and the graph, 0 where there is none."""
    graph = ctypes.c_void_p(7)
    code = engine.cuStreamEndCapture(stream, ctypes.byref(graph))
    return code, graph.value or 0


def captured(
    engine: hostlib.Engine, stream: int, body: Callable[[], Any], mode: int = THREAD_LOCAL
) -> int:
    """The graph of what the body queues on the stream."""
    begin(engine, stream, mode)
    body()
    code, graph = end(engine, stream)
    if code:
        raise hostlib.DriverError("cuStreamEndCapture", code, engine.error_name(code))
    return graph


@contextmanager
def executable(engine: hostlib.Engine, graph: int) -> Iterator[int]:
    """The graph, ready to be launched; it is destroyed at once, as clients do."""
    made = engine.made("cuGraphInstantiateWithFlags", graph, 0)
    engine.must("cuGraphDestroy", graph)
    try:
        yield made
    finally:
        engine.must("cuGraphExecDestroy", made)


@contextmanager
def capture_mode(engine: hostlib.Engine, mode: int) -> Iterator[None]:
    """The calling thread's interaction mode, for the time of the block."""
    exchanged = ctypes.c_int(mode)
    engine.must("cuThreadExchangeStreamCaptureMode", ctypes.byref(exchanged))
    try:
        yield
    finally:
        engine.must("cuThreadExchangeStreamCaptureMode", ctypes.byref(exchanged))
