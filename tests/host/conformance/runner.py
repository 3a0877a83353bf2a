"""Ask a library all rules, in child processes: a rule that kills or hangs its process is named.

As a program: ``python runner.py NCCL CUDA-or-dash NEEDS[,NEEDS]``, with the names of the rules
on stdin, one a line; it prints a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from conformance.rules import Rule
    from conformance.trial import Library

LIMIT_S = 20.0
STUCK = 75


@dataclass(frozen=True)
class Answer:
    """What came of one rule: everything that was seen, and what was wrong with it."""

    seen: list[object]
    complaints: list[str]


def ask(
    rules: list[Rule],
    nccl: str,
    cuda: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Answer]:
    """The answers of a library by the names of the rules."""
    answers: dict[str, Answer] = {}
    waiting = [rule.name for rule in rules]
    while waiting:
        status, errors = _ask_some(waiting, nccl, cuda, environment or {}, answers)
        waiting = [name for name in waiting if name not in answers]
        if waiting and status == 0:
            raise RuntimeError(f"the rules could not be asked of {nccl}:\n{errors}")
        if waiting and status > 0 and status != STUCK:
            raise RuntimeError(f"the rules could not be asked of {nccl}:\n{errors}")
        if waiting:
            why = f"signal {-status}" if status < 0 else f"it does not end in {LIMIT_S:.0f} s"
            answers[waiting.pop(0)] = Answer([], [why])
    return answers


def _ask_some(
    names: list[str],
    nccl: str,
    cuda: str | None,
    environment: Mapping[str, str],
    answers: dict[str, Answer],
) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, __file__, nccl, cuda or "-"],
        input="\n".join(names),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**_clean_environment(), **environment},
    )
    for line in done.stdout.splitlines():
        if line.startswith('{"rule"'):
            found = json.loads(line)
            answers[found["rule"]] = Answer(found["seen"], found["complaints"])
    return done.returncode, done.stderr


def _clean_environment() -> dict[str, str]:
    """No setting of this machine reaches a library."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "PYNCCL_HOST_"))}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(sys.path),  # pynccl, also where it is not installed
        "NCCL_CONF_FILE": os.devnull,
    }


# ---- the child


def run(rule: Rule, library: Library) -> Answer:
    """Ask one rule, on a thread of its own."""
    from conformance.trial import Trial

    trial = Trial(library)

    def body() -> None:
        try:
            rule.body(trial)
        except Exception as error:
            trial.complaints.append(f"{type(error).__name__}: {error}")

    if library.is_host:
        for key, value in rule.settings.items():
            library.set(key, value)
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if thread.is_alive():
        sys.stdout.flush()
        os._exit(STUCK)
    if library.is_host:
        for key in rule.settings:
            library.set(key, DEFAULTS[key])
    return Answer(trial.seen, trial.complaints)


DEFAULTS = {
    "mode": "strict",
    "quirks": "",
    "faults": "",
    "windows": "1",
    "runtime_connect": "1",
    "multi_rank": "0",
    "temper": os.environ.get("PYNCCL_HOST_TEMPER", "quick"),
}


def main() -> None:
    """Ask the rules that are named on stdin."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from conformance.rules import every_rule
    from conformance.trial import Library

    nccl, cuda = sys.argv[1:3]
    library = Library(nccl, None if cuda == "-" else cuda)
    wanted = set(sys.stdin.read().split("\n"))
    for rule in every_rule():
        if rule.name in wanted:
            answer = run(rule, library)
            line = {"rule": rule.name, "seen": answer.seen, "complaints": answer.complaints}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
