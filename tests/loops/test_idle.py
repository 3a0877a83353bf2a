"""What costs nothing: communicators that are open, and long waits.

In a process of its own, so that the threads that are counted are those of this test.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from running import ones
from support.ranks import run_processes

import pynccl
from pynccl import testing

pytestmark = [pytest.mark.timing, pytest.mark.timeout(120)]


def switches() -> dict[str, int]:
    """How often each thread but this one has gone to sleep or been put aside so far."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) == os.getpid():
            continue
        fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        total = int(fields["voluntary_ctxt_switches"]) + int(
            fields["nonvoluntary_ctxt_switches"]
        )
        found[f"{task.name} {fields['Name'].strip()}"] = total
    return found


async def idles(place: Any, seconds: float) -> dict[str, Any]:
    """Rank function: open communicators, used on their lanes and inline, and then nothing."""
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    unique_id = await pynccl.unique_id("cpu:2")
    alone = await pynccl.Communicator.create(1, 0, unique_id, device="cpu:2")
    for _ in range(3):
        with testing.faults("op:delay=5ms"):
            await pynccl.wait(*(comm.all_reduce(ones()) for comm in [*comms, alone]))
    short = alone.all_reduce(ones(), timeout=0.4)
    await short
    await asyncio.sleep(1.0)  # the linger, and the deadline of what has ended
    before = switches()
    await asyncio.sleep(seconds)
    after = switches()
    woken = {name: after[name] - before.get(name, 0) for name in after}
    # It works as before, after its sleep.
    await pynccl.wait(*(comm.all_reduce(ones()) for comm in [*comms, alone]))
    await asyncio.gather(*(comm.close() for comm in [*comms, alone]))
    return {"woken": {name: n for name, n in woken.items() if n}, "threads": sorted(after)}


TEMPERS = ["quick", "gpulike"]


def at_once(function: Callable[..., Any], variants: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Its results for each of the arguments; processes that only wait can do so together."""
    arguments = list(variants)
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(lambda one: function(*one), arguments))


def test_nobody_wakes_up_when_nothing_is_pending(long: bool) -> None:
    def idle(temper: Any) -> Any:
        seconds = 10.0 if long else 4.0
        options = {"bare": True, "temper": temper, "arguments": [seconds], "timeout": 60}
        return run_processes(1, idles, **options)[0]

    for seen in at_once(idle, [(temper,) for temper in TEMPERS]):
        assert any("pynccl-waiter" in name for name in seen["threads"])
        assert seen["woken"] == {}


async def wakes(place: Any) -> dict[str, Any]:
    """Rank function: one thread that does wake up."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: [stop.wait(0.05) for _ in range(10)])
    thread.start()
    before = switches()
    await asyncio.sleep(0.3)
    after = switches()
    thread.join()
    return {name: after[name] - before[name] for name in before if after[name] > before[name]}


def test_a_thread_that_wakes_up_is_seen() -> None:
    assert max(run_processes(1, wakes, bare=True)[0].values()) >= 3


def spent() -> float:
    """Seconds of a core that the interpreter's and pynccl's threads have used.

    Not what plays the device, and not the threads of NumPy's BLAS, which spin for a while.
    """
    total = 0.0
    known = {str(thread.native_id) for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        ours = name.startswith("pynccl-") and name not in ("pynccl-stream", "pynccl-janitor")
        if ours or task.name in known:
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


async def waits(place: Any, seconds: float) -> float:
    """Rank function: the share of a core that a long wait for a peer takes."""
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    await pynccl.wait(*(comm.all_reduce(ones()) for comm in comms))
    used, start = spent(), time.monotonic()
    works = [comms[0].all_reduce(ones())]  # rank 1 comes at the end
    waiting = asyncio.ensure_future(pynccl.wait(*works))
    await asyncio.sleep(seconds)
    works.append(comms[1].all_reduce(ones()))
    await waiting
    share = (spent() - used) / (time.monotonic() - start)
    await asyncio.gather(*(comm.close() for comm in comms))
    return share


async def waits_alone(place: Any, seconds: float) -> float:
    """Rank function: the same with a kernel that takes long."""
    unique_id = await pynccl.unique_id("cpu")
    comm = await pynccl.Communicator.create(1, 0, unique_id, device="cpu")
    await comm.all_reduce(ones())
    used, start = spent(), time.monotonic()
    with testing.faults(f"op:delay={seconds}s"):
        await comm.all_reduce(ones())
    share = (spent() - used) / (time.monotonic() - start)
    await comm.close()
    return share


def test_a_long_wait_costs_little() -> None:
    """Under 1 % of a core over five seconds; the longer it takes, the less."""

    def attempts(function: Any, temper: Any) -> list[float]:
        shares: list[float] = []
        while len(shares) < 3 and (not shares or shares[-1] >= 0.01):
            shares += run_processes(1, function, bare=True, temper=temper, arguments=[5.0])
        return shares

    for shares in at_once(attempts, product([waits, waits_alone], TEMPERS)):
        assert min(shares) < 0.01, f"shares of a core: {shares}"


async def wakes_up_late(place: Any, ms: float) -> list[float]:
    """Rank function: how long after the end of an operation its await returns, in ms."""
    unique_id = await pynccl.unique_id("cpu")
    comm = await pynccl.Communicator.create(1, 0, unique_id, device="cpu", timeout=None)
    comm.spin_us = 0
    await comm.all_reduce(ones())
    late = []
    for _ in range(10):
        with testing.faults(f"op:delay={ms}ms"):
            work = comm.all_reduce(ones(), timed=True)
            start = time.monotonic()
            await work
            late.append((time.monotonic() - start) * 1e3 - ms)
    await comm.close()
    return late


@pytest.mark.parametrize("ms", [1.0, 20.0, 400.0])
def test_naps_are_short_beside_the_wait(ms: float) -> None:
    """The price of long naps: an await is late by a sixteenth or 0.5 ms, then by 1/128."""
    late = sorted(run_processes(1, wakes_up_late, bare=True, arguments=[ms])[0])
    allowed = max(min(ms / 16, 0.5), ms / 128)
    # Half a millisecond is this machine's: the eventfd, the interpreter, other load.
    assert late[len(late) // 2] < allowed + 1.0, late
