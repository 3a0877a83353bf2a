"""One rank of a rendezvous as a process: `python -m support.meeting_child TASK`, in JSON.

It says "joining" before and "joined" after the join, then waits to be ended. "fork" leaves a
child behind that inherits everything and outlives it. "mpi" initialises MPI first, so.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from pynccl._bootstrap import Launch, Session, join, locate
from pynccl.errors import DeadlineError


async def payload() -> bytes:
    """Return what rank 0 gives out."""
    return b"x" * 128


def leave_a_child_behind() -> None:
    """Fork a process that does nothing, but outlives this one."""
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)


async def enter(place: Launch, timeout: float) -> Session:
    """Join at that place."""
    return await join(
        place.address,
        rank=place.rank,
        size=place.size,
        hello={"host": "child", "pid": str(os.getpid())},
        payload=payload,
        timeout=timeout,
    )


async def give_up(place: Launch, times: int) -> None:
    """Meet once, so that all is set up; then rank 0 is too late for the next attempts."""
    await (await enter(place, 30.0)).close()
    if place.rank == 0:
        await asyncio.sleep(0.4 * times + 1.0)
        return
    for _ in range(times):
        try:
            await enter(place, 0.4)
        except DeadlineError:
            print("gave-up", flush=True)


async def live(task: dict[str, Any]) -> None:
    """Join as the task says."""
    place = await locate(
        task["address"], os.environ, rank=task.get("rank"), size=task.get("size")
    )
    print("joining", flush=True)
    if "give_up" in task:
        await give_up(place, task["give_up"])
    for _ in range(task.get("times", 1)):
        session = await enter(place, 30.0)
        await session.report(True)
        if task.get("leave"):
            await session.close()
    if task.get("fork"):
        leave_a_child_behind()
    print("joined", flush=True)
    if not task.get("leave"):
        await asyncio.sleep(60)


def main() -> None:
    """Run the task of the command line."""
    task = json.loads(sys.argv[1])
    if "mpi" in task:
        import mpi4py

        mpi4py.rc.thread_level = task["mpi"]
        from mpi4py import MPI

        assert MPI.Is_initialized()
    asyncio.run(live(task))


if __name__ == "__main__":
    main()
