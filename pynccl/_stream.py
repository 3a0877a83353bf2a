"""Streams and events of the devices that pynccl knows."""

from __future__ import annotations

from typing import Any

from pynccl import _engines
from pynccl._native.streams import EventHandle, StreamHandle


class Stream(StreamHandle):
    """A device's queue of work that runs in order (``cuStreamCreateWithPriority``).

    ``await stream`` waits until what is on it now has ended. Works with everything that takes
    ``__cuda_stream__``.

    Args:
        device: as in ``connect``.
        priority: lower numbers run first; the device's range is its own, 0 is always in it.
    """

    def __init__(self, device: str | int | None = None, *, priority: int = 0) -> None:
        engine, ordinal = _engines.resolve(device)
        self._native_create(engine, ordinal, priority)

    @classmethod
    def of(cls, stream: Any, device: str | int | None = None) -> Stream:
        """Somebody else's stream, by ``__cuda_stream__`` or raw handle; it stays theirs.

        Args:
            stream: the stream, which is kept alive.
            device: the device that it belongs to, as in ``connect``.
        """
        engine, ordinal = _engines.resolve(device)
        made = cls.__new__(cls)
        made._native_borrow(engine, ordinal, stream)
        return made

    def record(self, event: Event | None = None) -> Event:
        """Mark this point in an event (``cuEventRecord``), a fresh one if none is given."""
        if event is None:
            event = Event.__new__(Event)
            event._native_create(self.engine, self.device_ordinal, False)
        event.record(self)
        return event

    def __repr__(self) -> str:
        return f"<Stream {self.handle:#x} on {self.engine.name} device {self.device_ordinal}>"


class Event(EventHandle):
    """A point in a stream (``cuEventCreate``).

    ``await event`` waits until the point that was last recorded has been reached.

    Args:
        device: as in ``connect``.
        timing: whether ``elapsed`` can be asked; without it an event is cheaper.
    """

    def __init__(self, device: str | int | None = None, *, timing: bool = False) -> None:
        engine, ordinal = _engines.resolve(device)
        self._native_create(engine, ordinal, timing)

    def __repr__(self) -> str:
        return f"<Event {self.handle:#x} on {self.engine.name} device {self.device_ordinal}>"
