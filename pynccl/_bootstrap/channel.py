"""One TCP connection as a stream of frames."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import cast

from pynccl._bootstrap import inherited
from pynccl._bootstrap.frames import Decoder, Frame, FrameError, Kind, encode

FLUSH_SECONDS = 0.2
"""How long a last word may wait for a peer that does not read."""


class Cut(Exception):  # what happened to the connection; `str` tells how
    """The connection has ended."""


class Channel(asyncio.Protocol):
    """Frames in, frames out; no task of its own.

    Until `listen`, frames queue up for `receive`. After it, each goes to a callback, and so
    does the end of the connection. Either side may call `abort` at any time, also before it is
    connected.
    """

    def __init__(self, limit: int) -> None:
        """Take bodies of at most `limit` bytes; see `Decoder`."""
        self._decoder = Decoder(limit)
        self._transport: asyncio.Transport | None = None
        self._inbox: deque[Frame] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._on_frame: Callable[[Frame], None] | None = None
        self._on_end: Callable[[str], None] | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reason = ""
        self._aborted = False
        self.peer = ""

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Tune the socket."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if name else "unknown peer"
        sock = transport.get_extra_info("socket")
        if sock is not None:
            keep_alive(sock)
            inherited.forget_in_child(self, sock.fileno())
        if self._aborted:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Decode, and hand over what is whole."""
        if self._reason:
            return
        self._decoder.feed(data)
        try:
            while not self._reason and (frame := self._decoder.take()) is not None:
                self._hand_over(frame)
        except FrameError as exc:
            self.abort(f"protocol error ({exc})")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits."""
        inherited.drop(self)
        self._end(f"connection lost ({exc})" if exc else "connection closed")
        if not self._closed.done():
            self._closed.set_result(None)

    # our side

    @property
    def is_open(self) -> bool:
        """Whether frames can still go out."""
        return self._transport is not None and not self._reason

    def raise_limit(self, limit: int) -> None:
        """Take larger bodies from now on: the peer has proved itself."""
        self._decoder.limit = limit

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Queue one frame; a no-op on a connection that has ended."""
        if self._transport is not None and not self._reason:
            self._transport.write(encode(kind, body))

    async def receive(self) -> Frame:
        """Return the next frame; raise `Cut` once the connection has ended."""
        while not self._inbox:
            if self._reason:
                raise Cut(self._reason)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._inbox.popleft()

    def listen(self, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]) -> None:
        """Give every frame, queued ones first, to `on_frame`, and the end to `on_end`."""
        self._on_frame, self._on_end = on_frame, on_end
        try:
            while self._inbox and self._on_frame is not None:
                self._on_frame(self._inbox.popleft())
        except FrameError as exc:
            self.abort(f"protocol error ({exc})")
        if self._reason:
            asyncio.get_running_loop().call_soon(self._tell_end)

    def abort(self, reason: str = "connection closed here") -> None:
        """Close at once, in whatever state; the peer sees a reset or an end of stream."""
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    def part(self, kind: Kind, body: bytes = b"") -> None:
        """Say a last word and close without waiting; who does not read soon misses it."""
        self.send(kind, body)
        self.retire()

    def retire(self) -> None:
        """Close without waiting, once what was sent is out; no callback comes any more."""
        self._on_frame = self._on_end = None
        if self._transport is not None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._transport.abort)
        self._aborted = True
        self._end("connection closed here")

    async def closed(self) -> None:
        """Wait until the connection has ended; returns at once if there never was one."""
        if self._transport is not None:
            await asyncio.wait({self._closed})

    def _hand_over(self, frame: Frame) -> None:
        if self._on_frame is not None:
            self._on_frame(frame)
            return
        self._inbox.append(frame)
        self._wake()

    def _end(self, reason: str) -> None:
        if not self._reason:
            self._reason = reason
            self._wake()
            self._tell_end()

    def _tell_end(self) -> None:
        on_end, self._on_frame, self._on_end = self._on_end, None, None
        if on_end is not None:
            on_end(self._reason)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel find a dead host or a cut cable in half a minute; send small frames now.

    The kernel, not a heartbeat of ours: it answers for a process whose loop is busy (loading a
    model, compiling), and such a peer is not lost.
    """
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    tuning = (("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3))
    for name, value in (*tuning, ("TCP_USER_TIMEOUT", 30_000)):
        if (option := getattr(socket, name, None)) is not None:
            options.append((socket.IPPROTO_TCP, option, value))
    for level, option, value in options:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)
