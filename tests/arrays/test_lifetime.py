"""Memory lives until the device is done with it, and no longer; calls keep nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensors
from cliques import abort
from guarded import Yard
from tensors import Old, Versioned

import pynccl
from pynccl import testing

ROUNDS = 40


async def one_life(yard: Yard, dice: random.Random, kinds: list[type[Any]]) -> None:
    """Communicators, some operations on arrays that nobody else keeps, and some end of it."""
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    tasks: list[asyncio.Task[Any]] = []
    with testing.faults(f"op:delay={dice.choice((0, 1, 3))}ms"):
        for _ in range(6):
            kind = dice.choice(kinds)
            works = [c.all_reduce(kind(yard.array([1.0, 2.0]))) for c in comms]
            how = dice.randrange(4)
            if how == 0:
                await pynccl.wait(*works)
            elif how == 1:  # dropped
                del works
            else:  # awaited by a task that is cancelled, now or a little later
                tasks.append(asyncio.ensure_future(pynccl.wait(*works)))
                await asyncio.sleep(dice.choice((0, 0.001)))
                tasks[-1].cancel()
    if dice.random() < 0.5:
        await abort(comms)
    else:
        await asyncio.gather(*(comm.close() for comm in comms))
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, pynccl.NcclError):
            await task


def test_nothing_is_touched_after_its_end(temper: str) -> None:
    """A late write would end the process; whatever is kept too long is counted."""
    dice = random.Random(7)
    kinds = [lambda x: x, Versioned, Old, tensors.table_type()]
    yard = Yard(ROUNDS * 12)
    for _ in range(ROUNDS):
        asyncio.run(one_life(yard, dice, kinds))  # type: ignore[arg-type]
    for _ in range(100):
        if not yard.alive:
            break
        gc.collect()
        tensors.none_held()
    assert yard.alive == 0
    assert tensors.held() == 0
    assert tensors.number("deleted_badly") == 0


# ---- nothing grows ---------------------------------------------------------------------------


def makers() -> dict[str, Callable[[], Any]]:
    import jax.numpy as jnp

    floats = np.ones(4, np.float32)
    found: dict[str, Callable[[], Any]] = {
        "NumPy": lambda: floats,
        "versioned": lambda: Versioned(floats),
        "table": lambda: tensors.table_type()(floats),
        "JAX": lambda: jnp.ones(4),
    }
    with contextlib.suppress(ImportError):
        import torch

        found["torch"] = lambda: torch.ones(4)
    return found


async def test_calls_keep_nothing(monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
    """Python's memory is the same after many calls; after a million with --long."""
    monkeypatch.setenv("PYNCCL_ENGINE", "noop")
    (comm,) = await pynccl.create_all(["cpu:0"])
    grown = {}
    for name, make in makers().items():
        x = make()
        slow = name in ("JAX", "versioned")
        total = 1_000_000 if long else 10_000 if slow else 100_000
        getattr(x, "asked", []).clear()

        def calls(count: int, x: Any = x) -> None:
            for _ in range(count):
                comm.all_reduce(x)
                if type(x) is Versioned:
                    x.asked.clear()

        calls(1000)
        gc.collect()
        tracemalloc.start()
        calls(1000)
        await asyncio.sleep(0.05)  # whatever has ended is let go of by then
        found = [tracemalloc.get_traced_memory()[0]]
        for _ in range(2):  # pools may fill late, but what each call keeps is there both times
            calls(total)
            await asyncio.sleep(0.05)
            gc.collect()
            found.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        grown[name] = min(found[1] - found[0], found[2] - found[1])
    await comm.close()
    assert max(grown.values()) < 20_000, grown
