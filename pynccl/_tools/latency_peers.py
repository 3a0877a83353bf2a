"""Awaited 8-byte all-reduces between processes: ours, and what asyncio can do with mpi4py.

Run as a module it is one rank: `python -m pynccl._tools.latency_peers ours|mpi`, placed by the
environment.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from pynccl._tools.figures import Figure
from pynccl._tools.peers_child import settle

TURNS = 200
ROUNDS = 200
LAUNCHES = 5  # how the kernel places the processes differs from one to the next
BARS = {2: {"mpi4py Iallreduce": 2.0, "mpi4py to_thread": 20.0}, 4: {"best of mpi4py": 5.0}}


def between_processes(size: int, rounds: int) -> Figure:
    """The figure for a number of ranks, one process each; launched in turns with the rival."""
    name = f"awaited 8-byte all_reduce, {size} processes"
    absent: dict[str, str] = {}
    rival = (
        importlib.util.find_spec("mpi4py") is not None and shutil.which("mpirun") is not None
    )
    if not rival:
        absent["mpi4py"] = "mpi4py or mpirun is not installed"
    launches: list[dict[str, float]] = []
    for _ in range(min(rounds, LAUNCHES)):
        launches.append({**run_ours(size), **(run_mpi(size) if rival else {})})
    found = {key: statistics.median(one[key] for one in launches) for key in launches[0]}
    ours = found.pop("await")
    if rival and size > 2:
        found["best of mpi4py"] = min(found.values())
    return Figure(name, "us", ours, found, BARS.get(size, {}), absent=absent)


def run_ours(size: int) -> dict[str, float]:
    """Start the ranks by environment variables; rank 0 prints its medians."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pynccl._tools.latency_peers", "ours"]
    ranks = []
    for rank in range(size):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    return dict(json.loads(outputs[0]))


def run_mpi(size: int) -> dict[str, float]:
    """The same under mpirun, with mpi4py."""
    mpirun = shutil.which("mpirun")
    assert mpirun is not None
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    rank = [sys.executable, "-m", "pynccl._tools.latency_peers", "mpi"]
    done = subprocess.run(
        [mpirun, "--oversubscribe", "-n", str(size), *rank],
        env=environment,
        stdout=subprocess.PIPE,
        timeout=240,
        check=True,
    )
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    return dict(json.loads(lines[0]))


async def turn_us(turn: Callable[[], Awaitable[object]], turns: int) -> float:
    """A turn's time: the median of rounds of so many.

    Not of single turns: ranks that share a core make two turns, and are away for two.
    """
    rounds = []
    await turn()  # all of them from here on
    settle()
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        for _ in range(turns):
            await turn()
        rounds.append((time.perf_counter_ns() - start) / turns / 1e3)
    return statistics.median(rounds)


async def ours() -> dict[str, float]:
    """One rank of ours."""
    import pynccl

    async with pynccl.connect(device="cpu") as comm:
        comm.spin_us = 20
        x = np.ones(2, np.float32)
        await comm.all_reduce(x, op="max")
        found = await turn_us(lambda: comm.all_reduce(x, op="max"), TURNS)
        await comm.barrier()
        return {"await": found} if comm.rank == 0 else {}


async def mpi() -> dict[str, float]:
    """One rank of mpi4py's."""
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD
    x = np.ones(2, np.float32)
    y = np.empty_like(x)

    async def test_loop() -> None:
        request = world.Iallreduce(x, y)
        # MPI offers nothing to wait for but Test.
        while not request.Test():  # noqa: ASYNC110
            await asyncio.sleep(0)

    def in_thread() -> Awaitable[object]:
        return asyncio.to_thread(world.Allreduce, x, y)

    await test_loop()
    found = {
        "mpi4py Iallreduce": await turn_us(test_loop, TURNS // 4),
        "mpi4py to_thread": await turn_us(in_thread, TURNS // 10),
    }
    return found if world.rank == 0 else {}


if __name__ == "__main__":
    result = asyncio.run(ours() if sys.argv[1] == "ours" else mpi())
    if result:
        print(json.dumps(result), flush=True)
