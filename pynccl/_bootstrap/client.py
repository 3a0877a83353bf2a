"""Every other rank's side: find rank 0, prove, say hello, wait for the start."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import secrets
import socket
import ssl as tls
from dataclasses import dataclass
from typing import Any

from pynccl._bootstrap.address import Endpoint
from pynccl._bootstrap.boards import Board
from pynccl._bootstrap.channel import Channel, Cut
from pynccl._bootstrap.frames import HUB_LIMIT, STRANGER_LIMIT, FrameError, Kind, pack
from pynccl._bootstrap.handshake import SECRET, Caller, Refused
from pynccl._bootstrap.verdict import Verdict, VerdictReached
from pynccl._bootstrap.waiting import Deadline, Expired, off_loop, within
from pynccl.errors import BootstrapError

log = logging.getLogger("pynccl.bootstrap")

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0
FIRST_PAUSE, LAST_PAUSE = 0.02, 0.5
SLACK_SECONDS = 0.3
"""How much longer than its own deadline a rank waits for rank 0 to say who is missing."""


@dataclass(frozen=True)
class Start:
    """What every rank knows when all have come."""

    channel: Channel
    hellos: list[dict[str, str]]
    payload: bytes


class Client:
    """One rank's way into the job. `close` ends whatever is open, whenever it is called."""

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        size: int,
        hello: dict[str, str],
        key: bytes,
        deadline: Deadline,
        ssl: tls.SSLContext | None,
    ) -> None:
        """Nothing is opened before `enter`."""
        self._board = board
        self._rank, self._size, self._hello = rank, size, hello
        self._key, self._ssl = key, ssl
        self._deadline = deadline
        self._ticket = secrets.token_hex(16)
        self._channel: Channel | None = None
        self._trouble = "it has not said where it listens"
        self._tries = 0
        self._distrusted = False

    async def enter(self) -> Start:
        """Come in and wait for the others.

        Raises `VerdictReached` with what rank 0 decided or, where it could not be asked, with
        what is known here; `BootstrapError` if the secret or the certificate is refused.
        """
        try:
            channel = await within(self._deadline.left(), self._knock())
        except Expired:
            text = (
                f"rank {self._rank} could not reach rank 0 in {self._deadline.elapsed():.1f} s "
                f"({self._tries} tries): {self._trouble}"
            )
            raise VerdictReached(Verdict(text, (0,), late=True)) from None
        try:
            return await within(self._deadline.left() + SLACK_SECONDS, self._wait(channel))
        except Expired:
            text = (
                f"rank 0 did not answer rank {self._rank} in {self._deadline.elapsed():.1f} s"
            )
            raise VerdictReached(Verdict(text, (0,), late=True)) from None

    def close(self, reason: str) -> None:
        """Tell rank 0, if it listens, that this rank gives up, and close the connection."""
        if self._channel is not None:
            self._channel.part(Kind.BYE, pack({"reason": reason}))

    # knocking

    async def _knock(self) -> Channel:
        pause = FIRST_PAUSE
        while True:
            endpoint = await self._board.look()
            if endpoint is not None:
                for host in endpoint.candidates():
                    if (channel := await self._try_host(endpoint, host)) is not None:
                        return channel
            if self._distrusted:  # on no address of rank 0's; waiting will not mend that
                raise BootstrapError(f"rank {self._rank} cannot join: {self._trouble}")
            await asyncio.sleep(pause)
            pause = min(LAST_PAUSE, pause * 1.5)

    async def _try_host(self, endpoint: Endpoint, host: str) -> Channel | None:
        try:
            resolved = await resolve(host, endpoint.port)
        except OSError as exc:
            self._trouble = f"{host}: {exc.strerror or exc}"
            return None
        for family, address in resolved:
            self._tries += 1
            where = f"{address[0]} port {endpoint.port}"
            channel = self._channel = Channel(STRANGER_LIMIT)
            try:
                await within(
                    CONNECT_SECONDS, connect(channel, family, address, self._ssl, host)
                )
                await within(ANSWER_SECONDS, self._introduce(channel, endpoint))
            except Expired:
                self._trouble = f"{where} did not answer"
            except (Cut, FrameError) as exc:
                self._trouble = f"{where}: {exc}"
            except Refused as refused:
                if refused.why == SECRET:
                    raise BootstrapError(
                        f"rank {self._rank} was not let in by rank 0 at {where}: {refused.text}"
                    ) from None
                self._trouble = f"{where}: {refused.text}"
            except tls.SSLCertVerificationError as exc:
                self._trouble = f"{where} is not trusted: {exc.verify_message}"
                self._distrusted = True
            except OSError as exc:
                self._trouble = f"{where}: {_reason(exc)}"
            else:
                return channel
            channel.abort()
            log.debug("rank %d: %s", self._rank, self._trouble)
        return None

    async def _introduce(self, channel: Channel, endpoint: Endpoint) -> None:
        caller = Caller(
            key=self._key, room=self._board.room, expected=endpoint.nonce, rank=self._rank
        )
        channel.send(Kind.OPEN, caller.open())
        channel.send(Kind.PROOF, caller.prove(await channel.receive()))
        caller.verify(await channel.receive())
        channel.raise_limit(HUB_LIMIT)
        left = self._deadline.left()
        hello = {
            "rank": self._rank,
            "size": self._size,
            "ticket": self._ticket,
            "seconds": None if math.isinf(left) else left,
            "hello": self._hello,
        }
        channel.send(Kind.HELLO, pack(hello))
        frame = await channel.receive()
        if frame.kind is Kind.FAIL:
            raise VerdictReached(Verdict.read(frame))
        if frame.kind is not Kind.NOTED:
            raise FrameError(f"{frame.kind.name} out of turn")

    # waiting

    async def _wait(self, channel: Channel) -> Start:
        hellos: list[dict[str, str]] = []
        while True:
            try:
                frame = await channel.receive()
            except Cut as exc:
                raise VerdictReached(
                    Verdict(f"rank 0 vanished before all ranks had come: {exc}", (0,))
                ) from None
            if frame.kind is Kind.FAIL:
                raise VerdictReached(Verdict.read(frame))
            if frame.kind is Kind.PEERS:
                hellos = _hellos(frame.json(), self._size)
            elif frame.kind is Kind.START and hellos:
                return Start(channel, hellos, frame.body)
            else:
                raise VerdictReached(
                    Verdict(f"rank 0 sent {frame.kind.name} out of turn", (0,))
                )


async def connect(
    channel: Channel,
    family: int,
    address: tuple[Any, ...],
    ssl: tls.SSLContext | None,
    host: str,
) -> None:
    """Connect the channel to a resolved address; closes the socket however it fails."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        _must_not_be_itself(sock)
        await loop.create_connection(
            lambda: channel, sock=sock, ssl=ssl, server_hostname=host if ssl else None
        )
    except BaseException:
        channel.abort()
        sock.close()
        raise


def _must_not_be_itself(sock: socket.socket) -> None:
    # A port of the ephemeral range on which nobody listens can be given to the caller itself.
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


async def resolve(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return (family, socket address) of a host; names are looked up off the loop."""
    kind = socket.SOCK_STREAM
    try:
        found = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await off_loop(lambda: socket.getaddrinfo(host, port, type=kind))
    return [(family, address) for family, _, _, _, address in found]


def _hellos(value: dict[str, Any], size: int) -> list[dict[str, str]]:
    hellos = value.get("hellos")
    if not isinstance(hellos, list) or len(hellos) != size:
        raise VerdictReached(Verdict("rank 0 sent no list of the ranks", (0,)))
    return [{str(k): str(v) for k, v in hello.items()} for hello in hellos]


def _reason(exc: OSError) -> str:
    if exc.errno is not None:
        with contextlib.suppress(ValueError):
            return os.strerror(exc.errno)
    return str(exc) or type(exc).__name__
