"""Several ranks of a rendezvous in one process, and a check that they leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from pynccl._bootstrap import Session, join

T = TypeVar("T")

PAYLOAD = bytes(range(128))

make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
"""The loop that `run` uses; tests put another one in its place."""


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def tcp(port: int) -> str:
    """The address of a port of the loopback."""
    return f"tcp://127.0.0.1:{port}"


def open_sockets() -> int:
    """How many sockets this process has open."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += str(entry.readlink()).startswith("socket:")
        except OSError:
            continue
    return count


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on a loop in debug mode; fail if it leaves a socket, a task or a thread."""

    async def watched() -> T:
        gc.collect()
        sockets, threads = open_sockets(), threading.active_count()
        result = await main()
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            left = (open_sockets() - sockets, len(others), threading.active_count() - threads)
            if max(left) <= 0:
                return result
            await asyncio.sleep(0.01)
        raise AssertionError(f"left behind (sockets, tasks, threads): {left}")

    loop = make_loop()
    loop.set_debug(True)
    try:
        return loop.run_until_complete(watched())
    finally:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=5))
        loop.close()


async def payload() -> bytes:
    """What rank 0 gives out."""
    return PAYLOAD


async def rank(
    number: int,
    size: int,
    address: str,
    *,
    timeout: float = 10.0,
    delay: float = 0.0,
    hello: dict[str, str] | None = None,
    check: Callable[[list[dict[str, str]]], str | None] | None = None,
    payload: Callable[[], Awaitable[bytes]] | None = payload,
    secret: bytes | str | None = None,
    context: ssl.SSLContext | None = None,
) -> Session:
    """One rank's join, with what most tests do not care about filled in."""
    await asyncio.sleep(delay)
    said = {"host": f"host{number}", "pid": str(os.getpid()), **(hello or {})}
    return await join(
        address,
        rank=number,
        size=size,
        hello=said,
        check=check,
        payload=payload if number == 0 else None,
        timeout=timeout,
        secret=secret,
        ssl=context,
    )


async def meet(size: int, address: str, **options: Any) -> list[Session]:
    """All ranks' joins at once; every one must succeed."""
    return list(
        await asyncio.gather(
            *(rank(number, size, address, **options) for number in range(size))
        )
    )


async def outcomes(*joins: Awaitable[Session]) -> list[Any]:
    """What each join gives: a session or the exception it raised."""
    return list(await asyncio.gather(*joins, return_exceptions=True))


async def until(condition: Callable[[], bool], seconds: float = 1.0) -> bool:
    """Wait for a condition; tell whether it came true in time."""
    end = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < end:
        await asyncio.sleep(0.005)
    return is_true


async def close(*sessions: Session) -> None:
    """Close them all at once."""
    await asyncio.gather(*(session.close() for session in sessions))
