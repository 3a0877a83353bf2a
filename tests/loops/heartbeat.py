"""A heartbeat beside a test, and the rule that it never misses a beat by 20 ms."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

LIMIT_MS = 20.0
ATTEMPTS = 4


class Heartbeat:
    """A task that wants to run every millisecond.

    `worst` is its longest gap in milliseconds. What the kernel made the loop's thread wait for
    a core is taken off: other processes of a busy machine are not the loop's fault. Nothing
    else is: a thread that sleeps in a call, or for a lock, is on no run queue.
    """

    def __init__(self) -> None:
        self.worst = 0.0
        self.beats = 0

    async def __aenter__(self) -> Heartbeat:
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._last = time.perf_counter()
        self._queued = self._queued_s()
        self._task = asyncio.ensure_future(self._beat())
        await asyncio.sleep(0)
        return self

    def _queued_s(self) -> float:
        """Seconds that this thread has waited for a core so far."""
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    def _note(self) -> None:
        now, queued = time.perf_counter(), self._queued_s()
        gap = now - self._last - (queued - self._queued)
        self.worst = max(self.worst, gap * 1e3)
        self._last, self._queued = now, queued
        self.beats += 1

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self._note()

    async def __aexit__(self, *error: object) -> None:
        self._note()  # a gap that lasts until the end is one
        self._task.cancel()
        os.close(self._schedstat)


async def gap_during(part: Callable[[], Awaitable[Any]]) -> float:
    """Run something beside a heartbeat: the worst gap in ms."""
    async with Heartbeat() as heartbeat:
        await part()
    return heartbeat.worst


def require_free(gaps: list[float], what: str, limit_ms: float = LIMIT_MS) -> None:
    """Fail unless the best attempt kept the loop free."""
    seen = ", ".join(f"{gap:.1f}" for gap in gaps)
    assert min(gaps) < limit_ms, (
        f"{what}: the longest gaps of a 1 ms heartbeat were {seen} ms, at most {limit_ms:g} "
        "are allowed"
    )


async def keeps_free(
    part: Callable[[], Awaitable[Any]], what: str, *, limit_ms: float = LIMIT_MS
) -> None:
    """Require that the loop is free while `part` runs; other load is given a few attempts."""
    gaps = [await gap_during(part)]
    while gaps[-1] >= limit_ms and len(gaps) < ATTEMPTS:
        gaps.append(await gap_during(part))
    require_free(gaps, what, limit_ms)
