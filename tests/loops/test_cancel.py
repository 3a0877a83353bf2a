"""A cancelled await leaves nothing behind: no complaint of the loop, and no late write.

These run in processes of their own: a write into an array that has died ends the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import signal
from typing import Any

import pytest
from guarded import Yard
from running import awaited, ones, pair
from support.ranks import run_processes

import pynccl
from pynccl import testing
from pynccl.errors import AbortedError

pytestmark = pytest.mark.timeout(120)


async def cancels(place: Any, ranks: int, rounds: int, seed: int) -> dict[str, Any]:
    """Rank function: cancel at a random moment, drop everything, and go on."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    complaints: list[str] = []
    loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
    yard = Yard(ranks * rounds)
    ended = {"cancelled": 0, "result": 0}
    if ranks == 1:
        unique_id = await pynccl.unique_id("cpu")
        comms = [await pynccl.Communicator.create(1, 0, unique_id, device="cpu")]
    else:
        comms = await pynccl.create_all([f"cpu:{i}" for i in range(ranks)])
    most = 0
    longest = 2e-3
    with testing.faults("op:delay=150us,probability=0.5"):
        for _ in range(rounds):
            xs = [yard.array([rank + 1.0] * 8) for rank in range(ranks)]
            works = [comm.all_reduce(x) for comm, x in zip(comms, xs, strict=True)]
            tasks = [asyncio.ensure_future(awaited(work)) for work in works]
            if rng.random() < 0.3:
                tasks.append(works[0].future())
            if rng.random() < 0.2:
                tasks.append(asyncio.ensure_future(pynccl.wait(*works)))
            how = rng.random()
            if how < 0.4:
                await asyncio.sleep(rng.random() * longest)
            elif how < 0.8:
                await asyncio.sleep(0)
            for task in rng.sample(tasks, len(tasks)):
                task.cancel()
            del works, xs
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, asyncio.CancelledError):
                    ended["cancelled"] += 1
                else:
                    assert not isinstance(outcome, BaseException), outcome
                    ended["result"] += 1
            del outcomes, outcome, tasks, task
            most = max(most, yard.alive)
    await asyncio.gather(*(comm.close() for comm in comms))
    for _ in range(100):
        if not yard.alive:
            break
        gc.collect()
        await asyncio.sleep(0.01)
    return {"complaints": complaints, "alive": yard.alive, "most": most, **ended}


@pytest.mark.timing
@pytest.mark.parametrize("temper", ["quick", "gpulike"])
@pytest.mark.parametrize(("ranks", "kind"), [(1, "asyncio"), (2, "asyncio"), (2, "uvloop")])
def test_cancelled_at_a_random_moment(ranks: int, kind: str, temper: Any, long: bool) -> None:
    rounds = 10_000 if long else 1000
    seen = run_processes(
        1,
        cancels,
        bare=True,
        temper=temper,
        arguments=[ranks, rounds, 7],
        env={"PYNCCL_TEST_LOOP": kind},
        timeout=800 if long else 100,
    )[0]
    assert seen["complaints"] == []
    assert seen["alive"] == 0
    assert seen["cancelled"] > rounds / 20
    assert seen["result"] > 0
    # Dropped arrays live as long as the device is busy with them, and not until the end.
    assert seen["most"] < ranks * rounds


async def aborts(place: Any, rounds: int) -> dict[str, Any]:
    """Rank function: the arrays of an aborted operation live until the abort has returned."""
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
    yard = Yard(4 * rounds)
    aborted = 0
    for turn in range(rounds):
        comms = await pynccl.create_all(["cpu:0", "cpu:1"])
        with testing.faults("op:delay=2ms,probability=0.7"):
            works = [comm.all_reduce(yard.array([1.0] * 8)) for comm in comms for _ in (1, 2)]
            tasks = [asyncio.ensure_future(awaited(work)) for work in works]
            del works
            await asyncio.sleep(0.0005 * (turn % 5))
            tasks[0].cancel()
            await asyncio.gather(*(comm.abort() for comm in comms))
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        aborted += sum(isinstance(outcome, AbortedError) for outcome in outcomes)
        del outcomes, tasks
    for _ in range(100):
        if not yard.alive:
            break
        gc.collect()
        await asyncio.sleep(0.01)
    return {"complaints": complaints, "alive": yard.alive, "aborted": aborted}


@pytest.mark.parametrize("temper", ["quick", "gpulike"])
def test_aborted_at_a_random_moment(temper: Any, long: bool) -> None:
    rounds = 300 if long else 40
    seen = run_processes(
        1, aborts, bare=True, temper=temper, arguments=[rounds], timeout=800 if long else 100
    )[0]
    assert seen == {"complaints": [], "alive": 0, "aborted": seen["aborted"]}
    assert seen["aborted"] > rounds / 4


async def writes_late(place: Any) -> None:
    """Rank function: what the guards are for."""
    yard = Yard(1)
    x = yard.array([1.0])
    address = x.ctypes.data
    ctypes.c_float.from_address(address).value = 2.0
    assert x[0] == 2.0
    del x
    ctypes.c_float.from_address(address).value = 3.0


def test_a_late_write_is_seen() -> None:
    run_processes(1, writes_late, bare=True, exits={0: -signal.SIGSEGV})


async def test_a_cancelled_group_of_waits(loop: str, temper: str) -> None:
    """The waits of one batch: some are cancelled between its arrival and their turn."""
    async with pair() as comms:
        for _ in range(30):
            with testing.faults("op:delay=3ms"):
                a, b = ones(), ones()
                works = [comms[0].all_reduce(a), comms[1].all_reduce(b)]
                tasks = [asyncio.ensure_future(awaited(w)) for w in works for _ in range(4)]
                await asyncio.wait(tasks[:1])
                for task in tasks[1::2]:
                    task.cancel()
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert outcomes[0] is a
            for i, outcome in enumerate(outcomes):
                assert isinstance(outcome, asyncio.CancelledError) or outcome is (a, b)[i // 4]
            await pynccl.wait(*works)
