"""Arrays live as long as the device needs them, and 50 ms longer at most.

Each case runs in a fresh interpreter, so that nothing else polls, drains or collects: the
binding must let go by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timing

PROMISE_S = 0.05
DELAY_S = 0.1

PROGRAM = """
import asyncio, gc, sys, time, weakref
import numpy as np
import pynccl
from pynccl import testing

RANKS, HOW = int(sys.argv[1]), sys.argv[2]
gc.disable()

class Witness:
    \"\"\"When an array was issued, and when it died.\"\"\"

    def __init__(self, x):
        self.died = None
        weakref.finalize(x, self.mark)

    def mark(self):
        self.died = time.perf_counter()

async def make():
    comms = await pynccl.create_all([f"cpu:{i}" for i in range(RANKS)])
    await pynccl.wait(*(comm.all_reduce(np.zeros(4)) for comm in comms))
    return comms

def issue(comms):
    \"\"\"One operation a rank; nothing but the binding keeps the arrays.\"\"\"
    witnesses = []
    for comm in comms:
        x = np.zeros(1000)
        witnesses.append(Witness(x))
        work = comm.all_reduce(x, out=np.zeros(1000)) if HOW == "inputs" else comm.all_reduce(x)
        del x, work
    return witnesses

def report(issued, witnesses):
    for witness in witnesses:
        print(witness.died - issued if witness.died else "alive")

async def end(comms):
    await asyncio.gather(*(comm.close() for comm in comms))

def without_a_loop():
    comms = asyncio.run(make())
    with testing.faults("op:delay=100ms"):
        witnesses = issue(comms)
        issued = time.perf_counter()
        time.sleep(0.3)
    report(issued, witnesses)
    asyncio.run(end(comms))

async def on_a_loop():
    comms = await make()
    with testing.faults("op:delay=100ms"):
        witnesses = issue(comms)
        issued = time.perf_counter()
        await asyncio.sleep(0.3)
    report(issued, witnesses)
    await end(comms)

async def cancelled():
    comms = await make()

    async def waits():
        works = [comm.all_reduce(x) for comm, x in zip(comms, arrays)]
        await pynccl.wait(*works)

    with testing.faults("op:delay=100ms"):
        arrays = [np.zeros(1000) for _ in comms]
        witnesses = [Witness(x) for x in arrays]
        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0.01)
        issued = time.perf_counter() - 0.01
        task.cancel()
        arrays.clear()
        try:
            await task
        except asyncio.CancelledError:
            pass
        del task
        await asyncio.sleep(0.3)
    report(issued, witnesses)
    await end(comms)

async def awaited():
    comms = await make()
    with testing.faults("op:delay=100ms"):
        arrays = [np.zeros(1000) for _ in comms]
        witnesses = [Witness(x) for x in arrays]
        works = [comm.all_reduce(x) for comm, x in zip(comms, arrays)]
        issued = time.perf_counter()
        arrays.clear()
        await pynccl.wait(*works)
        works.clear()
        await asyncio.sleep(0.2)
    report(issued, witnesses)
    await end(comms)

async def recorded_and_dropped():
    \"\"\"Of a group that ends with an exception nothing is issued, so nothing is held.\"\"\"
    comms = await make()
    issued = time.perf_counter() + 0.1
    try:
        async with pynccl.group():
            witnesses = issue(comms)
            raise KeyError
    except KeyError:
        pass
    await asyncio.sleep(0.15)
    report(issued - 0.1, witnesses)
    await end(comms)

async def failed():
    \"\"\"After a failure they are held until the abort has returned, and no longer.\"\"\"
    comms = await make()
    with testing.faults("op:stuck"):
        witnesses = issue(comms)
        await asyncio.sleep(0.05)
        report(0.0, witnesses)
        issued = time.perf_counter()
        await asyncio.gather(*(comm.abort() for comm in comms))
    await asyncio.sleep(0.1)
    report(issued, witnesses)

if HOW in ("sleeping", "inputs"):
    without_a_loop()
else:
    asyncio.run(globals()[HOW]())
"""


def deaths(ranks: int, how: str, temper: str) -> list[str]:
    """Seconds from the issue to each array's death, or "alive"."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ranks), how],
        env={
            **os.environ,
            "PYNCCL_HOST_TEMPER": temper,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
@pytest.mark.parametrize("ranks", [1, 2], ids=["inline", "lanes"])
@pytest.mark.parametrize("how", ["on_a_loop", "sleeping", "inputs", "cancelled", "awaited"])
def test_an_array_dies_soon_after_the_end(temper: str, ranks: int, how: str) -> None:
    """With no further call: the loop sleeps, or there is none at all."""
    times = deaths(ranks, how, temper)
    assert len(times) == ranks
    for time in times:
        assert DELAY_S * 0.9 <= float(time) <= DELAY_S + PROMISE_S, times


@pytest.mark.parametrize("ranks", [1, 2], ids=["inline", "lanes"])
def test_what_was_never_issued_is_not_held(ranks: int) -> None:
    for time in deaths(ranks, "recorded_and_dropped", "quick"):
        assert float(time) <= PROMISE_S


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
@pytest.mark.parametrize("ranks", [1, 2], ids=["inline", "lanes"])
def test_after_a_failure_they_are_held_until_the_abort(temper: str, ranks: int) -> None:
    times = deaths(ranks, "failed", temper)
    assert times[:ranks] == ["alive"] * ranks
    for time in times[ranks:]:
        assert float(time) <= 2 * PROMISE_S
