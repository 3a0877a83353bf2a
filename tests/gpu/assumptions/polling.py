"""An event query on one thread beside a capture on another.

While a thread captures a stream in global mode, no thread may make calls that could disturb it,
and an event query is one: it fails and breaks the capture, unless its own thread is in relaxed
mode. pynccl's waiter thread polls events all the time.
"""

from __future__ import annotations

import ctypes
import threading

from . import abi
from .stage import Stage

CAPTURE_UNSUPPORTED = 900
NBYTES = 4096
READY_S = 5.0


class Poller(threading.Thread):
    """Asks an event once while the capture runs, in relaxed capture mode or not."""

    def __init__(self, stage: Stage, event: int, *, relaxed: bool) -> None:
        super().__init__(daemon=True)
        self.stage = stage
        self.event = event
        self.relaxed = relaxed
        self.status: int | None = None
        self.ready, self.go = threading.Event(), threading.Event()

    def run(self) -> None:
        api = self.stage.api
        self.stage.enter()
        mode = ctypes.c_int(abi.CAPTURE_RELAXED)
        if self.relaxed:
            api.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        self.ready.set()
        self.go.wait()
        self.status = api.cuEventQuery(self.event)
        if self.relaxed:
            api.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def run(stage: Stage, relaxed: bool) -> None:
    """Capture on this thread while another one asks an event.

    Args:
        stage: one rank, which makes no communicator.
        relaxed: whether the other thread is in relaxed mode; if not, the capture should break.
    """
    api, note = stage.api, stage.notebook
    stream, other = stage.stream(), stage.stream()
    memory = stage.memory(NBYTES)
    event = stage.mark(other)
    stage.finish(other)
    poller = Poller(stage, event, relaxed=relaxed)
    poller.start()
    poller.ready.wait(READY_S)
    note.doing("a capture in global mode")
    code = api.cuStreamBeginCapture_v2(stream, abi.CAPTURE_GLOBAL)
    if code:
        raise api.error("cuStreamBeginCapture_v2", code)
    api.call("cuMemsetD8Async", memory, 1, NBYTES, stream)
    poller.go.set()
    poller.join()
    graph = ctypes.c_void_p()
    ended = api.cuStreamEndCapture(stream, ctypes.byref(graph))
    note.measure(query_status=poller.status, end_of_capture_status=ended)
    if relaxed:
        note.check("the query answers", poller.status == abi.SUCCESS, poller.status)
        note.check("the capture survives it", ended == abi.SUCCESS and bool(graph), ended)
    else:
        refused = poller.status == CAPTURE_UNSUPPORTED
        note.check("outside relaxed mode the query is refused", refused, poller.status)
        note.check("and it breaks the capture", ended != abi.SUCCESS, ended)
