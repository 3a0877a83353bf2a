"""Deadlines, and blocking calls kept off the loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Expired(Exception):  # a state of a wait, not something to show to a user
    """A bounded wait reached its end."""


class Deadline:
    """A point in the running loop's time, counted from the construction; inf means never."""

    def __init__(self, seconds: float) -> None:
        """Start counting `seconds` from now."""
        self._loop = asyncio.get_running_loop()
        self.start = self._loop.time()
        self.seconds = seconds

    def elapsed(self) -> float:
        """Return the seconds since the construction."""
        return self._loop.time() - self.start

    def left(self) -> float:
        """Return the seconds that remain, never less than zero."""
        return max(0.0, self.seconds - self.elapsed())


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """Await for at most `seconds`; raise `Expired` after that.

    The awaited task is always finished when this returns, also when the caller is cancelled:
    what it opened it has closed. (`asyncio.wait_for` of Python 3.10 and 3.11 can lose a
    cancellation.)
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=None if math.isinf(seconds) else seconds)
        if not task.done():
            raise Expired
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen, so that the loop does not report it as never retrieved


async def off_loop(call: Callable[[], T]) -> T:
    """Run a blocking call on a thread of its own and await the result.

    The loop's executor is not used: its threads are joined at exit, and a name server or a
    network file system that hangs would hold the whole program. A cancelled caller leaves the
    call to finish alone; its result is dropped.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as exc:  # carried to the loop, whatever it is
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="pynccl-bootstrap", daemon=True).start()
    return await done
