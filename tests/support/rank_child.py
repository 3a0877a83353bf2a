"""What runs in a process that `support.ranks` starts: one rank, or all of them together."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

Layout: TypeAlias = Literal["processes", "shared", "loops"]
RankFunction: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(frozen=True)
class Place:
    """Which rank of how many, and where they meet."""

    rank: int
    size: int
    address: str

    @property
    def device(self) -> str:
        """The rank's own virtual device of the host engine."""
        return f"cpu:{self.rank}"


@dataclass(frozen=True)
class Task:
    """What one such process does; it crosses into it as JSON."""

    source: str
    """The file of the rank function, or a module's name."""
    function: str
    ranks: tuple[int, ...]
    size: int
    layout: Layout
    bare: bool
    address: str
    arguments: tuple[Any, ...]
    results: str
    """The folder into which each rank's value goes."""
    grace: float


_loops: list[asyncio.AbstractEventLoop] = []


def _child(task: Task) -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGUSR2, lambda *_: _print_tasks())
    if sys.platform == "linux":
        # Outlive the test run by no means; 1 is PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if task.layout == "loops":
        return _in_threads(task)
    _run_loop(_shared(task) if task.layout == "shared" else _own(task, task.ranks[0]))
    return 0


def _run_loop(main: Coroutine[Any, Any, None]) -> None:
    async def watched() -> None:
        _loops.append(asyncio.get_running_loop())
        await main

    if os.environ.get("PYNCCL_TEST_LOOP") == "uvloop":
        import uvloop

        uvloop.run(watched())
    else:
        asyncio.run(watched())


def _print_tasks() -> None:
    """Print where each task awaits: the whole chain, of which asyncio shows the first link."""
    for loop in _loops:
        for task in asyncio.all_tasks(loop):
            print(f"Task {task.get_name()} awaits in", file=sys.stderr)
            link: Any = task.get_coro()
            while (frame := getattr(link, "cr_frame", None)) is not None:
                traceback.print_list(traceback.extract_stack(frame, limit=1), file=sys.stderr)
                link = link.cr_await


def _function(task: Task) -> RankFunction:
    if not task.source.endswith(".py"):
        module = importlib.import_module(task.source)
    else:
        name = Path(task.source).stem
        spec = importlib.util.spec_from_file_location(name, task.source)
        if spec is None or spec.loader is None:
            raise ImportError(task.source)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    function: RankFunction = getattr(module, task.function)
    return function


def _keep(task: Task, rank: int, value: Any) -> None:
    Path(task.results, f"value-{rank}").write_text(json.dumps(value))


async def _own(task: Task, rank: int, function: RankFunction | None = None) -> None:
    """One rank that meets the others by itself."""
    function = function or _function(task)
    place = Place(rank, task.size, task.address)
    if task.bare:
        _keep(task, rank, await function(place, *task.arguments))
        return
    pynccl: Any = importlib.import_module("pynccl")  # late: bare ranks need none
    connection = pynccl.connect(task.address, rank=rank, size=task.size, device=place.device)
    async with connection as comm:
        _keep(task, rank, await function(comm, *task.arguments))


async def _shared(task: Task) -> None:
    """All ranks as tasks of one loop."""
    function = _function(task)
    if task.bare:
        ranks = [_own(task, rank, function) for rank in task.ranks]
    else:
        pynccl: Any = importlib.import_module("pynccl")
        places = [Place(rank, task.size, task.address) for rank in task.ranks]
        comms = await pynccl.create_all([place.device for place in places])

        async def one(comm: Any, rank: int) -> None:
            async with comm:
                _keep(task, rank, await function(comm, *task.arguments))

        ranks = [one(comm, rank) for rank, comm in enumerate(comms)]
    tasks = [asyncio.create_task(rank, name=f"rank {i}") for i, rank in enumerate(ranks)]
    _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if waiting:
        _, waiting = await asyncio.wait(waiting, timeout=task.grace)
        _print_tasks()
    failures = [
        (one.get_name(), error)
        for one in tasks
        if one not in waiting and (error := one.exception()) is not None
    ]
    for name, error in failures:
        print(f"{name}:", *traceback.format_exception(error), sep="\n", file=sys.stderr)
    if failures:
        raise SystemExit(1)


def _in_threads(task: Task) -> int:
    """Give each rank a thread and a loop."""
    function = _function(task)
    failed = threading.Event()

    def one(rank: int) -> None:
        try:
            _run_loop(_own(task, rank, function))
        except BaseException:
            print(f"rank {rank}:", traceback.format_exc(), sep="\n", file=sys.stderr)
            failed.set()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in task.ranks]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if failed.wait(0.05):
            limit = time.monotonic() + task.grace
            for thread in threads:
                thread.join(max(0.0, limit - time.monotonic()))
            break
    if any(thread.is_alive() for thread in threads):
        _print_tasks()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)  # the interpreter could not end: they may be anywhere
    return int(failed.is_set())


if __name__ == "__main__":
    raise SystemExit(_child(Task(**json.loads(sys.argv[1]))))
