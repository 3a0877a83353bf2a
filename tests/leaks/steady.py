"""What a process holds, read again and again while a program runs: `python steady.py PROGRAM`.

Each program prints one JSON line: its name and its samples. A sample is taken at the same point
of the program each time, after a collection of garbage.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import pynccl
from pynccl import testing

ROUNDS = 10
PAGE = os.sysconf("SC_PAGE_SIZE")


def held() -> dict[str, int]:
    """Bytes, file descriptors, threads, and every counter of the binding and of the engine."""
    gc.collect()
    own = Path("/proc/self")
    return {
        "bytes": int(Path(own, "statm").read_text().split()[1]) * PAGE,
        "files": len(list(Path(own, "fd").iterdir())),
        "threads": len(list(Path(own, "task").iterdir())),
        "blocks": sys.getallocatedblocks(),
        **{f"binding {name}": count for name, count in pynccl.diagnostics().items()},
        **{f"engine {name}": count for name, count in testing.live().items()},
    }


async def quiet() -> None:
    """Wait until nothing is in flight: a busy machine takes its time to end what was called."""
    end = time.monotonic() + 3
    while pynccl.diagnostics()["operations"] or testing.live()["work_items"]:
        if time.monotonic() > end:
            return  # the sample will show it
        await asyncio.sleep(0.005)


async def samples(a_round: Callable[[], Coroutine[Any, Any, None]]) -> list[dict[str, int]]:
    """What is held after each round."""
    taken = []
    # The default executor makes threads as they come to be needed, which is no leak of ours.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    for _ in range(ROUNDS):
        await a_round()
        await asyncio.sleep(0.03)  # what nobody has drained is drained by the reaper
        await quiet()
        taken.append(held())
    return taken


async def all_reduces(total: int) -> list[dict[str, int]]:
    """Awaited all-reduces of 8 bytes on one rank, which issues inline."""
    (comm,) = await pynccl.create_all(["cpu:0"])
    x = np.zeros(1)

    async def a_round() -> None:
        for _ in range(total // ROUNDS):
            await comm.all_reduce(x)

    try:
        return await samples(a_round)
    finally:
        await comm.close()


async def through_lanes(total: int) -> list[dict[str, int]]:
    """The same on two ranks of a process: through lanes, and with a suspension each."""
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    xs = [np.zeros(1), np.zeros(1)]

    async def a_round() -> None:
        for _ in range(total // ROUNDS):
            works = [comm.all_reduce(x) for comm, x in zip(comms, xs, strict=True)]
            await pynccl.wait(*works)

    try:
        return await samples(a_round)
    finally:
        await asyncio.gather(*(comm.close() for comm in comms))


async def lives(total: int) -> list[dict[str, int]]:
    """Communicators that are made, used, and closed or aborted with something pending."""

    async def one(number: int) -> None:
        comms = await pynccl.create_all(["cpu:0", "cpu:1"])
        async with pynccl.group():
            for comm in comms:
                comm.all_reduce(np.zeros(1000))
        if number % 2:
            await asyncio.gather(*(comm.close() for comm in comms))
            return
        work = comms[0].all_reduce(np.zeros(1000))
        await asyncio.gather(*(comm.abort() for comm in comms))
        assert isinstance(work.exception(), pynccl.AbortedError)

    async def a_round() -> None:
        for number in range(total // ROUNDS):
            await one(number)

    return await samples(a_round)


async def cancels(total: int) -> list[dict[str, int]]:
    """Awaits that are cancelled, and Works that are dropped, while the operation goes on."""
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])

    async def awaits(work: Any) -> None:
        await work

    async def a_round() -> None:
        for _ in range(total // ROUNDS):
            first = comms[0].all_reduce(np.zeros(8))
            task = asyncio.ensure_future(awaits(first))
            await asyncio.sleep(0)
            task.cancel()
            first.future().cancel()
            del first
            await comms[1].all_reduce(np.zeros(8))

    try:
        return await samples(a_round)
    finally:
        await asyncio.gather(*(comm.close() for comm in comms))


async def memory(total: int) -> list[dict[str, int]]:
    """Arrays of pynccl's own, their views, registrations, windows and operators."""
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])

    async def one() -> None:
        xs = [pynccl.empty(1000, device=comm) for comm in comms]
        views = [np.from_dlpack(x[10:]) for x in xs]
        windows = [comm.register_window(x) for comm, x in zip(comms, xs, strict=True)]
        async with comms[0].register(xs[0]), comms[0].register(xs[0][1:]):
            with contextlib.ExitStack() as stack:
                for comm, x in zip(comms, xs, strict=True):
                    op = stack.enter_context(pynccl.pre_mul_sum(comm, 2, "float32"))
                    comm.all_reduce(x, op=op)
                    comm.all_gather(x)
            comms[0].put(xs[0][:8], await windows[0], 1)
            await comms[1].wait_signal(0)
        await asyncio.gather(*(window.close() for window in windows))
        del views

    async def a_round() -> None:
        for _ in range(total // ROUNDS):
            await one()

    try:
        return await samples(a_round)
    finally:
        await asyncio.gather(*(comm.close() for comm in comms))


async def planted(total: int) -> list[dict[str, int]]:
    """A leak on purpose: an operation's array is kept, a file is left open, at each round."""
    kept: list[Any] = []
    (comm,) = await pynccl.create_all(["cpu:0"])

    async def a_round() -> None:
        for _ in range(total // ROUNDS):
            kept.append(await comm.all_reduce(np.ones(100)))
        kept.append(os.open("/dev/null", os.O_RDONLY))

    try:
        return await samples(a_round)
    finally:
        await comm.close()


PROGRAMS: dict[str, Callable[[int], Coroutine[Any, Any, list[dict[str, int]]]]] = {
    "all_reduces": all_reduces,
    "through_lanes": through_lanes,
    "lives": lives,
    "cancels": cancels,
    "memory": memory,
    "planted": planted,
}

if __name__ == "__main__":
    name, count = sys.argv[1:]
    print(json.dumps(asyncio.run(PROGRAMS[name](int(count)))))
