"""The command: try the assumptions, print a verdict for each.

Ends with status 0 if none fails, 1 if one does, 2 if the engine cannot be used here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from .catalog import CATALOG
from .runner import BUDGET_S, DEADLINE_S, Result, Runner
from .verdict import FAILS, HOLDS, CaseResult


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.assumptions",
        description="Try on this machine what pynccl assumes about NCCL and the CUDA driver.",
    )
    parser.add_argument("--engine", choices=("nccl", "host"), default="nccl")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--only", nargs="+", choices=[one.name for one in CATALOG], metavar="NAME", default=()
    )
    parser.add_argument(
        "--layout",
        choices=("processes", "threads"),
        default="processes",
        help="where two ranks are put; 'sharing' chooses threads where only they work",
    )
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE_S, metavar="S", help="seconds for a case"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="S", help="seconds for everything"
    )
    return parser.parse_args(given)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _print_result(result: Result) -> None:
    print(f"\n{result.verdict:9}  {result.name}: {result.question}")
    for case in result.cases:
        reason = f": {case.reason}" if case.reason else ""
        print(f"  {case.verdict:9}  {case.name} ({case.seconds:.1f} s){reason}")
        for name, value in case.measured.items():
            print(f"               {name} = {_shown(value)}")
    sys.stdout.flush()


def _title(engine: str, facts: CaseResult) -> str:
    here = facts.measured
    return (
        f"pynccl's assumptions, engine {engine}: {here['device']}, driver {here['driver']}, "
        f"NCCL {here['nccl']} ({here['library']})"
    )


def _all(results: Iterable[Result], *, quiet: bool) -> list[Result]:
    tried = []
    for result in results:
        tried.append(result)
        if not quiet:
            _print_result(result)
    return tried


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = _arguments(given)
    runner = Runner(
        arguments.engine, arguments.deadline, arguments.budget, layout=arguments.layout
    )
    facts = runner.facts()
    if facts.verdict != HOLDS:
        print(f"the {arguments.engine} engine cannot be used: {facts.reason}", file=sys.stderr)
        return 2
    if not arguments.json:
        print(_title(arguments.engine, facts))
    chosen = [one for one in CATALOG if not arguments.only or one.name in arguments.only]
    tried = _all(runner.run(chosen), quiet=arguments.json)
    if arguments.json:
        whole = {
            "engine": arguments.engine,
            "facts": facts.measured,
            "assumptions": [asdict(result) for result in tried],
        }
        print(json.dumps(whole, indent=2))
    return int(any(result.verdict == FAILS for result in tried))


if __name__ == "__main__":
    sys.exit(main())
