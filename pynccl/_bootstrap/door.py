"""Rank 0's door: the listening port, and who is let in through it.

Whatever knocks is a stranger until its handshake has passed: it gets little memory, little
time and no say. What is let in goes on to the hub together with its HELLO.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import socket
import ssl as tls
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pynccl._bootstrap import inherited
from pynccl._bootstrap.channel import Channel
from pynccl._bootstrap.frames import (
    HELLO_LIMIT,
    STRANGER_LIMIT,
    Frame,
    FrameError,
    Kind,
)
from pynccl._bootstrap.handshake import Doorkeeper, Refused
from pynccl.errors import BootstrapError

log = logging.getLogger("pynccl.bootstrap")

HANDSHAKE_SECONDS = 10.0
BREATHER_SECONDS = 0.5
SHUT = "the door was shut"
MOST_NOTES = 16
SPARE_STRANGERS = 64
"""Unproved connections held at once, beyond one a rank; the oldest then makes room."""


@dataclass(frozen=True)
class Arrival:
    """What a proved peer says of itself. `seconds` is how long it is still going to wait."""

    rank: int
    size: int
    ticket: str
    seconds: float
    hello: dict[str, str]

    @classmethod
    def read(cls, frame: Frame) -> Arrival:
        """Check a HELLO field by field; raise `FrameError`."""
        value = frame.json()
        hello = value.get("hello")
        rank, size, seconds = value.get("rank"), value.get("size"), value.get("seconds")
        ticket = value.get("ticket")
        if not (type(rank) is int and type(size) is int and isinstance(ticket, str)):
            raise FrameError("HELLO without rank, size and ticket")
        if seconds is None:
            seconds = math.inf
        elif not isinstance(seconds, int | float) or not math.isfinite(seconds):
            raise FrameError("HELLO whose seconds are no number")
        if not isinstance(hello, dict) or not all(isinstance(v, str) for v in hello.values()):
            raise FrameError("HELLO whose hello is no mapping of str")
        return cls(rank, size, ticket, float(seconds), hello)


class Door:
    """Listen, let in who passes the handshake, keep a note of who did not."""

    def __init__(
        self,
        *,
        size: int,
        key: bytes,
        room: str,
        nonce: bytes,
        let_in: Callable[[Arrival, Channel], None],
        refused: list[str],
    ) -> None:
        """Prepare; nothing is open before `open`. Who is turned away goes into `refused`."""
        self._size = size
        self._key, self._room, self._nonce = key, room, nonce
        self._let_in = let_in
        self._loop = asyncio.get_running_loop()
        self._refused = refused
        self._listener: socket.socket | None = None
        self._ssl: tls.SSLContext | None = None
        self._strangers: dict[_Stranger, None] = {}
        self._greetings: set[asyncio.Task[None]] = set()

    def open(self, host: str | None, port: int, ssl: tls.SSLContext | None) -> int:
        """Bind and listen; return the port. Raises `BootstrapError` naming a port in use."""
        self._listener = listen_on(host, port, backlog=min(4096, self._size + 128))
        self._listener.setblocking(False)
        self._ssl = ssl
        inherited.forget_in_child(self, self._listener.fileno())
        self._watch_listener()
        bound: int = self._listener.getsockname()[1]
        return bound

    @property
    def is_open(self) -> bool:
        """Whether somebody can still come in."""
        return self._listener is not None

    def shut(self) -> None:
        """Stop listening and turn away whoever is still in the handshake."""
        inherited.drop(self)
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        if self._ssl is not None:  # without TLS a greeting ends by itself, in a step or two
            for greeting in self._greetings:
                greeting.cancel()
        for stranger in list(self._strangers):
            stranger.leave(SHUT)

    # Not asyncio.Server: closed while it accepts, it forgets the new socket without closing it.

    def _watch_listener(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as exc:
            # Out of descriptors, most likely. Who knocks stays in the backlog meanwhile.
            log.warning("cannot accept a connection: %s", exc)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(BREATHER_SECONDS, self._watch_listener)
            return
        sock.setblocking(False)
        stranger = _Stranger(self)
        greeting = self._loop.create_task(self._greet(sock, stranger.channel))
        self._greetings.add(greeting)
        greeting.add_done_callback(partial(self._greeted, sock, stranger))

    async def _greet(self, sock: socket.socket, channel: Channel) -> None:
        await self._loop.connect_accepted_socket(
            lambda: channel,
            sock,
            ssl=self._ssl,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if self._ssl else None,
        )

    def _greeted(
        self, sock: socket.socket, stranger: _Stranger, greeting: asyncio.Task[None]
    ) -> None:
        self._greetings.discard(greeting)
        error = None if greeting.cancelled() else greeting.exception()
        if greeting.cancelled() or error is not None:
            stranger.leave(f"no connection came about: {error or SHUT}")
            sock.close()

    def note(self, stranger: _Stranger) -> None:
        """Hold a new stranger; the oldest makes room where there are too many."""
        self._strangers[stranger] = None
        if len(self._strangers) > self._size + SPARE_STRANGERS:
            next(iter(self._strangers)).leave("too many unproved connections")

    def forget(self, stranger: _Stranger) -> None:
        """Drop a stranger that has gone, or is none any more."""
        self._strangers.pop(stranger, None)

    def doorkeeper(self) -> Doorkeeper:
        """Return what conducts one handshake."""
        return Doorkeeper(key=self._key, room=self._room, nonce=self._nonce)

    def enter(self, arrival: Arrival, channel: Channel) -> None:
        """Pass a proved peer on."""
        self._let_in(arrival, channel)

    def refuse(self, channel: Channel, claimed: int | None, text: str) -> None:
        """Remember for the final message who was turned away and why."""
        who = f"rank {claimed} at {channel.peer}" if claimed is not None else channel.peer
        log.warning("refused %s: %s", who, text)
        if len(self._refused) < MOST_NOTES:
            self._refused.append(f"{who}: {text}")


class _Stranger:
    """One connection from accept to HELLO."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._keeper = door.doorkeeper()
        self.channel = Channel(STRANGER_LIMIT)
        self.channel.listen(self._frame, self._end)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HANDSHAKE_SECONDS, self.leave, "it said nothing in time")
        door.note(self)

    def leave(self, reason: str) -> None:
        self.channel.abort(reason)

    def _frame(self, frame: Frame) -> None:
        if self._keeper.passed:
            self._hello(frame)
            return
        try:
            kind, body = self._keeper.answer(frame)
        except Refused as refused:
            self._gone()
            self._door.refuse(self.channel, self._keeper.claimed, refused.text)
            self.channel.part(Kind.REFUSED, refused.body())
            return
        self.channel.send(kind, body)
        if kind is Kind.PROOF:  # it has passed
            self.channel.raise_limit(HELLO_LIMIT)

    def _hello(self, frame: Frame) -> None:
        if frame.kind is not Kind.HELLO:
            raise FrameError(f"{frame.kind.name} out of turn")
        arrival = Arrival.read(frame)
        self._gone()
        self._door.enter(arrival, self.channel)

    def _end(self, reason: str) -> None:
        self._gone()
        if reason != SHUT and not reason.startswith("connection"):
            self._door.refuse(self.channel, self._keeper.claimed, reason)

    def _gone(self) -> None:
        self._timer.cancel()
        self._door.forget(self)


def listen_on(host: str | None, port: int, backlog: int) -> socket.socket:
    """Return a bound socket.

    A loopback host binds the loopback only. Any other name binds every interface: on rank 0's
    own host the name often resolves to a loopback address which the other ranks could not
    reach.
    """
    literal = _loopback(host)
    try:
        if literal is not None:
            family = socket.AF_INET6 if ":" in literal else socket.AF_INET
            return socket.create_server((literal, port), family=family, backlog=backlog)
        if socket.has_dualstack_ipv6():
            try:
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
                )
            except OSError as exc:
                if exc.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
        return socket.create_server(
            ("", port), backlog=backlog
        )  # a kernel that was booted without IPv6
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise BootstrapError(
                f"port {port} is in use on this host, so rank 0 cannot listen; is another "
                "job, or an earlier attempt of this one, still running?"
            ) from exc
        raise BootstrapError(
            f"rank 0 cannot listen on {host or 'any address'} port {port}: {exc.strerror}"
        ) from exc


def _loopback(host: str | None) -> str | None:
    if host is None:
        return None
    if host == "localhost":
        return "127.0.0.1"
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return host
    return None
