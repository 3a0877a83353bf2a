"""Each tensor comes back exactly once, with the GIL held, however its operation ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensors
from cliques import abort, clique
from tensors import Old, Tensor, Versioned

import pynccl
from pynccl import InvalidBufferError, testing

KINDS: dict[str, Callable[[], type[Tensor]]] = {
    "versioned": lambda: Versioned,
    "unversioned": lambda: Old,
    "table": tensors.table_type,
}
Make = Callable[[], Tensor]


async def awaited(comms: list[Any], make: Make) -> None:
    await pynccl.wait(*(comm.all_reduce(make()) for comm in comms))


async def refused(comms: list[Any], make: Make) -> None:
    """For the output's sake, when the input has been taken already."""
    for out in (
        np.zeros(3, np.float32),
        np.zeros(4, np.int32),
        np.zeros(8, np.float32)[::2],
        5,
    ):
        with pytest.raises(InvalidBufferError):
            comms[0].all_reduce(make(), out=out)
    with pytest.raises(InvalidBufferError):
        comms[0].all_reduce(make(), op="any")
    with pytest.raises(pynccl.ConfigError):
        comms[0].all_reduce(make(), timeout=-1)


async def dropped(comms: list[Any], make: Make) -> None:
    for comm in comms:
        comm.all_reduce(make())


async def cancelled(comms: list[Any], make: Make) -> None:
    async def waits() -> None:
        await pynccl.wait(*(comm.all_reduce(make()) for comm in comms))

    with testing.faults("op:delay=20ms"):
        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0.005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert tensors.held() == len(comms)  # the device is not done


async def out_of_time(comms: list[Any], make: Make) -> None:
    with testing.faults("op:stuck"):
        work = comms[0].all_reduce(make(), timeout=0.02)
        with pytest.raises(pynccl.DeadlineError):
            await work
        assert tensors.held() == 1  # until the abort
        await abort(comms)


async def aborted(comms: list[Any], make: Make) -> None:
    with testing.faults("op:stuck"):
        works = [comm.all_reduce(make()) for comm in comms]
        await asyncio.sleep(0.01)
        await abort(comms)
        assert all(isinstance(work.exception(), pynccl.AbortedError) for work in works)


async def recorded(comms: list[Any], make: Make) -> None:
    with contextlib.suppress(KeyError):
        async with pynccl.group():
            for comm in comms:
                comm.all_reduce(make())
            raise KeyError
    async with pynccl.group():
        for comm in comms:
            comm.all_reduce(make())


HOW = (awaited, refused, dropped, cancelled, out_of_time, aborted, recorded)


@pytest.mark.parametrize("ranks", [1, 2], ids=["inline", "lanes"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
async def test_it_comes_back_once(
    temper: str, how: Callable[..., Coroutine[Any, Any, None]], kind: str, ranks: int
) -> None:
    made = KINDS[kind]()
    given, deleted = tensors.number("given"), tensors.number("deleted")
    async with clique(ranks, warm=True) as comms:
        await how(comms, lambda: made(np.ones(4, np.float32)))
    assert tensors.number("given") > given
    for attempt in range(100):
        if not tensors.held():
            break
        if attempt in (5, 50):
            gc.collect()  # an exception that was looked at holds its frame
        await asyncio.sleep(0.005)
    assert tensors.number("deleted") - deleted == tensors.number("given") - given
    assert tensors.number("deleted_badly") == 0


def test_a_loop_that_was_closed_with_work_in_flight() -> None:
    comms: list[Any] = []

    async def main() -> None:
        comms.extend(await pynccl.create_all(["cpu:0"]))
        await comms[0].all_reduce(np.ones(4))
        with testing.faults("op:delay=30ms"):
            comms[0].all_reduce(Versioned(np.ones(4)))

    asyncio.run(main())
    assert tensors.none_held()
    asyncio.run(comms[0].close())


AT_EXIT = """
import atexit, sys
import tensors

@atexit.register
def tell():  # registered first, so it comes last
    print(tensors.number("given"), tensors.number("deleted"), tensors.number("deleted_badly"))

import asyncio
import numpy as np
import pynccl
from pynccl import testing

async def main():
    (comm,) = await pynccl.create_all(["cpu:0"])
    await comm.all_reduce(np.ones(4))
    kind = tensors.Versioned if sys.argv[1] == "capsule" else tensors.table_type()
    with testing.faults(sys.argv[2]):
        comm.all_reduce(kind(np.ones(4)))
        if "stuck" not in sys.argv[2]:
            await asyncio.sleep(0.05)
    return comm

comm = asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["capsule", "table"])
@pytest.mark.parametrize(("fault", "deleted"), [("op:delay=1ms", 1), ("op:stuck", 0)])
def test_at_exit(kind: str, fault: str, deleted: int) -> None:
    """What the device is done with has come back; what it is not, never does."""
    paths = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AT_EXIT, kind, fault],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", str(deleted), "0"], done.stderr
