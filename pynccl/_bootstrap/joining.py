"""`join`: one rank's way from an address to a `Session`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl as tls
from collections.abc import Awaitable, Callable, Mapping

from pynccl._bootstrap.address import NONCE_BYTES, parse
from pynccl._bootstrap.boards import Board
from pynccl._bootstrap.choice import board_for
from pynccl._bootstrap.client import Client
from pynccl._bootstrap.door import Arrival, Door
from pynccl._bootstrap.frames import HELLO_LIMIT, pack
from pynccl._bootstrap.handshake import make_key
from pynccl._bootstrap.hub import Hub
from pynccl._bootstrap.session import Session, Spoke
from pynccl._bootstrap.verdict import Verdict, VerdictReached
from pynccl._bootstrap.waiting import Deadline, Expired, within
from pynccl.errors import BootstrapError, ConfigError

log = logging.getLogger("pynccl.bootstrap")

Check = Callable[[list[dict[str, str]]], str | None]
Payload = Callable[[], Awaitable[bytes]]

CLEAR_SECONDS = 1.0


async def join(
    address: str | None,
    *,
    rank: int,
    size: int,
    hello: Mapping[str, str],
    check: Check | None = None,
    payload: Payload | None = None,
    timeout: float,
    secret: bytes | str | None = None,
    ssl: tls.SSLContext | None = None,
) -> Session:
    """Meet the other ranks, agree, and stay connected.

    Every rank says who it is (`hello`: "host" and "pid" are used in messages, the rest is the
    caller's). When all have come, rank 0 calls `check(hellos)`, in rank order, which returns
    what is wrong or None, then awaits `payload()` and gives its bytes to all. `check` and
    `payload` of the other ranks are not used. A single rank opens nothing and needs no address.

    `secret`: both ends of each connection prove that they know it. `ssl`: on rank 0 a context
    for servers, elsewhere one for clients.

    Raises on every rank, with the same text: `BootstrapError` when ranks contradict each other,
    fail the check, or give up; `DeadlineError` with `missing` when the first rank's `timeout`
    (seconds) passed. Raises on one rank only: `BootstrapError` for a port in use, a wrong
    secret or an untrusted certificate; `ConfigError` for arguments. What `check` or `payload`
    raise goes through on rank 0, and as the text of a `BootstrapError` to the others.

    A `join` that is cancelled or fails leaves no socket and no task; the others are told.
    """
    if type(size) is not int or size < 1 or type(rank) is not int or not 0 <= rank < size:
        raise ConfigError(f"rank {rank!r} of {size!r}: must be 0 <= rank < size")
    key = make_key(secret)
    said = _checked(hello)
    deadline = Deadline(timeout)
    if size == 1:
        return await _alone(said, check, payload, deadline)
    if address is None:
        raise ConfigError(f"rank {rank} of {size} has no address to meet the others at")
    wanted = tls.PROTOCOL_TLS_CLIENT if rank == 0 else tls.PROTOCOL_TLS_SERVER
    if ssl is not None and ssl.protocol == wanted:
        raise ConfigError("ssl: rank 0 needs a server's context, the others a client's")
    board = board_for(parse(address), rank=rank, size=size)
    try:
        if rank == 0:
            return await _receive_all(board, size, said, check, payload, deadline, key, ssl)
        client = Client(
            board, rank=rank, size=size, hello=said, key=key, deadline=deadline, ssl=ssl
        )
        return await _enter(client, rank, size, deadline)
    finally:
        await _clear(board)


async def _alone(
    hello: dict[str, str], check: Check | None, payload: Payload | None, deadline: Deadline
) -> Session:
    if check is not None and (message := check([hello])) is not None:
        raise BootstrapError(message, missing=())
    try:
        blob = await within(deadline.left(), payload()) if payload is not None else b""
    except Expired:
        late = Verdict(
            f"rank 0 was not ready after {deadline.elapsed():.1f} s", (0,), late=True
        )
        raise late.error("connect", deadline.elapsed()) from None
    return Session(0, 1, [hello], blob)


async def _receive_all(
    board: Board,
    size: int,
    hello: dict[str, str],
    check: Check | None,
    payload: Payload | None,
    deadline: Deadline,
    key: bytes,
    ssl: tls.SSLContext | None,
) -> Session:
    nonce = secrets.token_bytes(NONCE_BYTES)
    own = Arrival(0, size, secrets.token_hex(16), deadline.left(), hello)
    refused: list[str] = []
    hub = Hub(own, deadline, refused)
    door = Door(
        size=size, key=key, room=board.room, nonce=nonce, let_in=hub.let_in, refused=refused
    )
    is_posted = False
    try:
        host, port = board.listen_at()
        port = door.open(host, port, ssl)
        await hub.guarded(lambda: board.post(port, nonce))
        is_posted = True
        hellos = await hub.gathered()
        door.shut()
        if check is not None and (message := check(hellos)) is not None:
            hub.fail(Verdict(message))
        hub.raise_if_failed()
        blob = await hub.guarded(payload) if payload is not None else b""
        hub.start(hellos, blob)
    except VerdictReached as reached:
        late = reached.verdict.late
        await hub.farewell(more_may_come=door.is_open and not late)
        hub.cut()
        raise reached.verdict.error("connect", deadline.elapsed()) from None
    except Exception as exc:
        hub.fail(Verdict(f"rank 0 failed: {exc or type(exc).__name__}", (0,)))
        await hub.farewell(more_may_come=door.is_open and is_posted)
        hub.cut()
        raise
    except BaseException:
        hub.fail(Verdict("rank 0 gave up: it was cancelled", (0,)))
        hub.cut()
        raise
    finally:
        door.shut()
    session = Session(0, size, hellos, blob)
    hub.deliver = session.receive
    session.attach(hub)
    return session


async def _enter(client: Client, rank: int, size: int, deadline: Deadline) -> Session:
    try:
        start = await client.enter()
    except VerdictReached as reached:
        client.close(reached.verdict.text)
        raise reached.verdict.error("connect", deadline.elapsed()) from None
    except asyncio.CancelledError:
        client.close("it was cancelled")
        raise
    except BaseException as exc:
        client.close(str(exc))
        raise
    session = Session(rank, size, start.hellos, start.payload)
    session.attach(Spoke(start.channel))
    start.channel.listen(session.receive, session.cut_off)
    return session


async def _clear(board: Board) -> None:
    try:
        await within(CLEAR_SECONDS, board.clear())
    except Expired:
        log.warning("the address of the finished attempt could not be taken down in time")


def _checked(hello: Mapping[str, str]) -> dict[str, str]:
    said = dict(hello)
    for name, value in said.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(f"hello[{name!r}] is {value!r}: names and values must be str")
    if len(pack({"hello": said})) > HELLO_LIMIT - 1024:
        raise ConfigError(f"hello is larger than {HELLO_LIMIT - 1024} bytes as JSON")
    return said
