"""Ranks in processes, one of which is killed at a random moment.

`python killing.py RANKS ROUNDS SEED`

The processes are forks of this one, which imports pynccl and never uses it. A round prints one
JSON line: who was killed and when, what became of the others, and what is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import pynccl

BOUND_S = 20.0
"""The deadline of every operation; long, so that nobody passes by waiting for it."""
MEET_S = 4.0
"""How long the ranks try to meet: of a rank 0 that never listened nobody can know."""
PR_SET_PDEATHSIG = 1
LONGEST_S = 0.35
"""The latest kill after the start: meeting, init and some rounds of traffic come before."""


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


async def traffic(comm: Any, seed: int) -> None:
    """Operations, groups, children that come and go: the same on all ranks, for ever."""
    choice = random.Random(seed)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    while True:
        count = choice.choice((1, 1000, 200_000))
        what = choice.choice(("all_reduce", "exchange", "child", "many"))
        x, y = np.ones(count, np.float32), np.empty(count, np.float32)
        if what == "all_reduce":
            await comm.all_reduce(x)
            assert x[0] == x[-1] == comm.size
        elif what == "exchange":
            async with pynccl.group():
                comm.send(x, right)
                comm.recv(y, left)
        elif what == "child":
            child = await comm.split(comm.rank % 2, timeout=BOUND_S)
            await child.all_reduce(x)
            await child.close(timeout=BOUND_S)
        else:
            await pynccl.wait(*(comm.all_gather(x[:100]) for _ in range(20)))


async def survive(
    rank: int, size: int, ports: list[int], seed: int, go: int, out: int
) -> dict[str, Any]:
    """One rank until another is lost, and then with those that are left."""
    stage = "connect"
    os.write(out, b"\n")
    try:
        comm = await pynccl.connect(
            f"tcp://127.0.0.1:{ports[0]}",
            rank=rank,
            size=size,
            device=f"cpu:{rank}",
            timeout=MEET_S,
        )
        stage = "traffic"
        comm.timeout = BOUND_S
        try:
            await traffic(comm, seed)
        finally:
            await comm.abort()
    except pynccl.NcclError as error:
        failed = time.monotonic()
        said = f"{type(error).__name__}: {error}"
    # Who is lost comes over the pipe: finding it out is the launcher's business.
    lost = (await asyncio.to_thread(os.read, go, 1))[0]
    others = [one for one in range(size) if one != lost]
    again = await pynccl.connect(
        f"tcp://127.0.0.1:{ports[1]}",
        rank=others.index(rank),
        size=len(others),
        device=f"cpu:{rank}",
        timeout=BOUND_S,
    )
    async with again:
        x = np.ones(100, np.float32)
        await again.all_reduce(x, timeout=BOUND_S)
    return {"stage": stage, "failed": failed, "said": said, "sum": float(x[0])}


def child(rank: int, size: int, ports: list[int], seed: int, go: int, out: int) -> None:
    """The life of a forked process; it never returns."""
    # Should this program be killed itself, nobody would end the traffic.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        result = asyncio.run(survive(rank, size, ports, seed, go, out))
    except BaseException:
        result = {"broken": traceback.format_exc()}
    os.write(out, json.dumps(result).encode())
    os._exit(0)


def one_round(size: int, seed: int) -> dict[str, Any]:
    """Start the ranks, kill one, hear the others."""
    choice = random.Random(seed)
    victim, delay = choice.randrange(size), choice.random() * LONGEST_S
    ports = free_ports(2)
    pids, goes, outs = [], [], []
    for rank in range(size):
        (go_out, go_in), (out_out, out_in) = os.pipe(), os.pipe()
        if (pid := os.fork()) == 0:
            child(rank, size, ports, seed, go_out, out_in)
        os.close(go_out)
        os.close(out_in)
        pids.append(pid)
        goes.append(go_in)
        outs.append(out_out)
    for pipe in outs:
        os.read(pipe, 1)  # it is about to connect
    time.sleep(delay)
    named = named_by(pids[victim])
    os.kill(pids[victim], signal.SIGKILL)
    killed = time.monotonic()
    os.waitpid(pids[victim], 0)
    survivors = []
    for rank in range(size):
        with contextlib.suppress(BrokenPipeError):
            os.write(goes[rank], bytes([victim]))
    for rank in range(size):
        with os.fdopen(outs[rank], "rb") as pipe:
            text = pipe.read()
        os.close(goes[rank])
        if rank != victim:
            _, status = os.waitpid(pids[rank], 0)
            result = json.loads(text) if text else {"broken": f"ended with status {status}"}
            if "failed" in result:
                result["seconds"] = result.pop("failed") - killed
            survivors.append({"rank": rank, **result})
    return {
        "seed": seed,
        "victim": victim,
        "delay": delay,
        "survivors": survivors,
        "named": named,
        "listening": [port for port in ports if is_listening(port)],
    }


def is_listening(port: int) -> bool:
    """Whether somebody still listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def named_by(pid: int) -> list[str]:
    """The files in shared memory, and here, that a process has open."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(path.readlink()))
    return [name for name in links if name.startswith(("/dev/shm/", str(Path.cwd())))]


def left() -> dict[str, Any]:
    """What outlives a process if it is not careful."""
    tasks = [Path(task, "children") for task in Path("/proc/self/task").iterdir()]
    return {
        "files here": sorted(map(str, Path.cwd().iterdir())),
        "unix sockets": Path("/proc/net/unix").read_text().count("pynccl"),
        "children": [child for task in tasks for child in task.read_text().split()],
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


if __name__ == "__main__":
    ranks, rounds, first = map(int, sys.argv[1:])
    before = left()
    for number in range(rounds):
        print(json.dumps(one_round(ranks, first + number)), flush=True)
    print(json.dumps({"before": before, "after": left()}))
