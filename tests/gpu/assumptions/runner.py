"""Runs cases, each in fresh processes with a deadline, so that a hang is a verdict."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .catalog import CATALOG, FACTS, SHARED_GPU, Assumption, Case, Layout
from .child import Task, notes_path
from .notes import Notes
from .verdict import HOLDS, NOT_TRIED, CaseResult, Ending, combine, judge

DEADLINE_S = 30.0
BUDGET_S = 570.0
GRACE_S = 3.0
"""How long the others may take to end after one rank came out early."""


@dataclass
class Result:
    """One assumption, tried."""

    name: str
    question: str
    verdict: str
    cases: list[CaseResult]


@dataclass
class Runner:
    """Tries assumptions on one engine."""

    engine: str
    deadline: float = DEADLINE_S
    """Seconds for each case."""
    budget: float = BUDGET_S
    """Seconds for everything; what would begin later is not tried."""
    layout: Layout = "processes"
    """Where ranks are put that may be anywhere."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set last, over what a case sets."""

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.budget

    def facts(self) -> CaseResult:
        """What the engine and the machine are, or why they cannot be asked."""
        return self.try_case(FACTS, FACTS.cases[0])

    def run(self, assumptions: Sequence[Assumption] = CATALOG) -> Iterator[Result]:
        """Try assumptions one after another."""
        for one in assumptions:
            cases = [self.try_case(one, case) for case in one.cases]
            if one.name == "sharing":
                self._choose_layout(cases)
            yield Result(one.name, one.question, combine(cases), cases)

    def _choose_layout(self, cases: Sequence[CaseResult]) -> None:
        working = [case.name for case in cases if case.verdict == HOLDS]
        if working == ["threads"]:
            self.layout = "threads"

    def try_case(self, assumption: Assumption, case: Case) -> CaseResult:
        """Try one case."""
        start = time.monotonic()
        limit = min(self.deadline, self._end - start)
        if limit <= 1.0:
            return CaseResult(case.name, NOT_TRIED, "no time was left for it")
        layout = case.layout or self.layout
        everybody = tuple(range(case.ranks))
        groups = [everybody] if layout == "threads" else [(rank,) for rank in everybody]
        with tempfile.TemporaryDirectory(prefix="assumption-") as folder:
            place = Path(folder)
            children = [
                _Child(
                    Task(
                        assumption.name, case.arguments, self.engine, group, case.ranks, folder
                    ),
                    self._environment(case),
                )
                for group in groups
            ]
            try:
                _wait(children, place, start + limit)
            finally:
                for child in children:
                    child.kill()
            notes = [Notes.read(notes_path(place, rank)) for rank in everybody]
            endings = [child.ending() for child in children for _ in child.task.ranks]
        result = judge(case.name, notes, endings)
        result.seconds = round(time.monotonic() - start, 2)
        return result

    def _environment(self, case: Case) -> dict[str, str]:
        # What can be imported here can be imported there, this package by this name too.
        base = Path(__file__).resolve().parents[len(__package__.split("."))]
        path = os.pathsep.join(
            [str(Path(entry).resolve()) for entry in sys.path] + [os.fspath(base)]
        )
        wanted = {
            **os.environ,
            "PYTHONPATH": path,
            **SHARED_GPU,
            **case.environment,
            **self.environment,
        }
        return {name: value for name, value in wanted.items() if value is not None}


class _Child:
    """One process of a case."""

    def __init__(self, task: Task, environment: Mapping[str, str]) -> None:
        self.task = task
        self.hung = False
        self._killed = False
        self._output = Path(task.folder) / f"output-{task.ranks[0]}"
        with self._output.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.child", json.dumps(asdict(task))],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._text = ""

    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it if it still runs; it leads a group of its own, which ends with it."""
        if self.running():
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._text = self._output.read_text(errors="replace").strip()

    def ending(self) -> Ending:
        status = None if self._killed else self._process.returncode
        return Ending(status, self.hung, self._text[-500:])


def _came_out_early(children: Sequence[_Child], place: Path) -> bool:
    """A rank was not tried, met an error or died: the others may wait for it for ever."""
    for child in children:
        ends = [Notes.read(notes_path(place, rank)).end for rank in child.task.ranks]
        if {"not tried", "error"} & set(ends) or (not child.running() and "" in ends):
            return True
    return False


def _wait(children: Sequence[_Child], place: Path, deadline: float) -> None:
    early = False
    while any(child.running() for child in children):
        now = time.monotonic()
        if not early and _came_out_early(children, place):
            early, deadline = True, min(deadline, now + GRACE_S)
        if now > deadline:
            for child in children:
                child.hung = child.running() and not early
            return
        time.sleep(0.02)
