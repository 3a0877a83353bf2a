"""What costs nothing: communicators that are open, and long waits.

In a process of its own, so that the threads that are counted are those of this test.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from running import ones
from support.ranks import run_processes

import pynccl
from pynccl import testing

pytestmark = pytest.mark.timeout(120)


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


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
def test_nobody_wakes_up_when_nothing_is_pending(temper: Any, long: bool) -> None:
    seen = run_processes(
        1, idles, bare=True, temper=temper, arguments=[10.0 if long else 4.0], timeout=60
    )[0]
    assert any("pynccl-waiter" in name for name in seen["threads"])
    assert seen["woken"] == {}


async def wakes(place: Any) -> dict[str, Any]:
    """Rank function: one thread that does wake up."""
    import threading

    stop = threading.Event()
    thread = threading.Thread(target=lambda: [stop.wait(0.05) for _ in range(10)])
    thread.start()
    before = switches()
    await asyncio.sleep(0.3)
    after = switches()
    thread.join()
    return {name: after[name] - before[name] for name in before if after[name] > before[name]}


def test_a_thread_that_wakes_up_is_seen() -> None:
    (woken,) = run_processes(1, wakes, bare=True)[0].values()
    assert woken >= 3


async def waits(place: Any, seconds: float) -> dict[str, float]:
    """Rank function: the processor's time that a long wait takes."""
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    await pynccl.wait(*(comm.all_reduce(ones()) for comm in comms))
    used, start = time.process_time(), time.monotonic()
    works = [comms[0].all_reduce(ones())]  # rank 1 comes at the end
    waiting = asyncio.ensure_future(pynccl.wait(*works))
    await asyncio.sleep(seconds)
    works.append(comms[1].all_reduce(ones()))
    await waiting
    share = (time.process_time() - used) / (time.monotonic() - start)
    await asyncio.gather(*(comm.close() for comm in comms))
    return {"share": share}


async def waits_alone(place: Any, seconds: float) -> dict[str, float]:
    """Rank function: the same with a kernel that takes long."""
    unique_id = await pynccl.unique_id("cpu")
    comm = await pynccl.Communicator.create(1, 0, unique_id, device="cpu")
    await comm.all_reduce(ones())
    used, start = time.process_time(), time.monotonic()
    with testing.faults(f"op:delay={seconds}s"):
        await comm.all_reduce(ones())
    share = (time.process_time() - used) / (time.monotonic() - start)
    await comm.close()
    return {"share": share}


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
@pytest.mark.parametrize("function", [waits, waits_alone])
def test_a_long_wait_costs_little(function: Any, temper: Any) -> None:
    """Under 1 % of a core, ours and the host engine's workers together."""
    shares = []
    for _ in range(3):
        shares.append(
            run_processes(1, function, bare=True, temper=temper, arguments=[5.0])[0]["share"]
        )
        if shares[-1] < 0.01:
            break
    assert min(shares) < 0.01, f"shares of a core: {shares}"
