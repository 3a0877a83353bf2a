"""Run a rank function on several ranks: in fresh processes, or together in one fresh process.

A rank function is a coroutine function at the top level of a module. It receives the rank's
communicator (or, with `bare=True`, its `Place`, to connect or not as it likes) and the
arguments of the call, and returns something that JSON can carry. It runs in new interpreters
in any case: a crash is then a failed test and not a dead test run, and the settings of the
host engine, which are read once a process, are those of this test.

One deadline covers all ranks. When it passes, or when a rank has failed and the others do not
end by themselves soon after, what is left says where it hangs and is killed. The ends of all
ranks' outputs are in the exception, or printed where there is none.

`env={"PYNCCL_TEST_LOOP": "uvloop"}` runs the ranks on uvloop, `env={"PYTHONASYNCIODEBUG":
"1"}` in asyncio's debug mode.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from support.rank_child import Layout, Place, RankFunction, Task

__all__ = [
    "Layout",
    "Place",
    "RanksFailed",
    "Temper",
    "run_processes",
    "run_ranks",
    "run_threads",
]

Temper: TypeAlias = Literal["quick", "gpulike"]

GRACE_S = 5.0
"""How long the other ranks may take to end by themselves after one has failed."""
SHOWN_LINES = 100
"""How much of a rank's output is shown."""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMPI_", "PMI_", "PMIX_", "SLURM_")


class RanksFailed(AssertionError):
    """Some rank ended otherwise than expected; the message has every rank's end and output."""


def run_ranks(
    layout: Layout,
    ranks: int,
    function: RankFunction | str,
    *,
    temper: Temper = "quick",
    arguments: Sequence[Any] = (),
    bare: bool = False,
    env: Mapping[str, str] | None = None,
    timeout: float = 45.0,
    exits: Mapping[int, int] | None = None,
) -> list[Any]:
    """Run a rank function on every rank; return the values, in rank order.

    The layouts: "processes", a process for each rank; "shared", one process and one event loop,
    communicators from `create_all`; "loops", one process, where each rank has a thread with a
    loop and a `connect` of its own.

    `function` is a coroutine function or "module:function". `timeout` is in seconds, for all
    ranks together; it should end before the test's own deadline. `exits` names the ranks whose
    processes must not end with status 0, and how they end (`-signal.SIGKILL`); their value is
    None. Raises `RanksFailed`.
    """
    exits = exits or {}
    source, name = _locate(function)
    groups = [(rank,) for rank in range(ranks)] if layout == "processes" else [range(ranks)]
    deadline = time.monotonic() + timeout
    children: list[_Child] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        place = Path(folder)
        try:
            for group in groups:
                task = Task(
                    source=source,
                    function=name,
                    ranks=tuple(group),
                    size=ranks,
                    layout=layout,
                    bare=bare,
                    address=f"file://{place / 'rendezvous'}",
                    arguments=tuple(arguments),
                    results=folder,
                    grace=GRACE_S,
                )
                environment = _environment(temper, env or {})
                children.append(_start(task, place, environment, exits.get(group[0], 0)))
            _wait(children, deadline, timeout)
        finally:
            for child in children:
                child.signal(signal.SIGKILL)
                child.process.wait()
        reports = "\n".join(child.report() for child in children)
        title = f"{name} on {ranks} ranks ({layout}, {temper})"
        if any(child.failed for child in children):
            raise RanksFailed(f"{title}\n{reports}")
        values = {rank: place / f"value-{rank}" for rank in range(ranks)}
        silent = [rank for rank in values if rank not in exits and not values[rank].exists()]
        if silent:
            raise RanksFailed(
                f"{title}: ranks {silent} ended before the function did\n{reports}"
            )
        print(reports)
        return [json.loads(v.read_bytes()) if v.exists() else None for v in values.values()]


def run_processes(ranks: int, function: RankFunction | str, **options: Any) -> list[Any]:
    """Run each rank in a process of its own; the options are those of `run_ranks`."""
    return run_ranks("processes", ranks, function, **options)


def run_threads(
    ranks: int, function: RankFunction | str, *, loops: bool = False, **options: Any
) -> list[Any]:
    """Run all ranks in one process: "shared", or with `loops` "loops"; see `run_ranks`."""
    return run_ranks("loops" if loops else "shared", ranks, function, **options)


@dataclass
class _Child:
    ranks: tuple[int, ...]
    wanted: int
    process: subprocess.Popen[bytes]
    output: Path
    killed: str = ""

    @property
    def name(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        return f"rank {first}" if first == last else f"ranks {first} to {last}"

    @property
    def failed(self) -> bool:
        return bool(self.killed) or self.process.poll() not in (None, self.wanted)

    def signal(self, number: int) -> None:
        # The child leads a group of its own, so that what it started goes with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def report(self) -> str:
        status = self.killed or f"exit status {self.process.returncode}"
        if self.wanted:
            status += f", {self.wanted} expected"
        lines = self.output.read_text(errors="replace").splitlines()
        if len(lines) > SHOWN_LINES:
            lines = [f"({len(lines) - SHOWN_LINES} lines before)", *lines[-SHOWN_LINES:]]
        return "\n".join([f"---- {self.name}: {status}", *lines])


def _locate(function: RankFunction | str) -> tuple[str, str]:
    if isinstance(function, str):
        module, _, name = function.partition(":")
        return module, name
    source = inspect.getsourcefile(function)
    if (
        source is None
        or "." in function.__qualname__
        or not inspect.iscoroutinefunction(function)
    ):
        raise TypeError(f"{function!r} is no coroutine function at the top level of a module")
    return str(Path(source).resolve()), function.__qualname__


def _environment(temper: Temper, extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    # What can be imported here can be imported there.
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    own = {"PYNCCL_HOST_TEMPER": temper, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    return {**inherited, **own, **extra}


def _start(task: Task, folder: Path, environment: dict[str, str], wanted: int) -> _Child:
    output = folder / f"output-{task.ranks[0]}"
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.rank_child", json.dumps(asdict(task))],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return _Child(task.ranks, wanted, process, output)


def _wait(children: Sequence[_Child], deadline: float, timeout: float) -> None:
    reason = f"killed: not done after {timeout:g} s"
    while any(child.process.poll() is None for child in children):
        broken = [child.name for child in children if child.failed]
        if broken and not reason.startswith("killed: another"):
            reason = f"killed: another failed ({broken[0]}); not done {GRACE_S:g} s later"
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            _kill([child for child in children if child.process.poll() is None], reason)
            return
        time.sleep(0.005)


def _kill(children: Sequence[_Child], reason: str) -> None:
    # Both signals make the child say where it is: the loop's tasks, and the threads' stacks.
    for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGKILL):
        for child in children:
            child.killed = reason
            child.signal(number)
        time.sleep(0.2)
