"""`python -m pynccl bench`: what an operation costs, against its rivals in the same run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from pynccl._tools import latency, peers
from pynccl._tools.figures import Figure


def show(figures: list[Figure]) -> None:
    """Print the table."""
    for figure in figures:
        mark = "ok  " if figure.passed else "MISS"
        print(f"{mark} {figure.name}: {figure.ours:.3g} {figure.unit}")
        for rival, value in figure.rivals.items():
            bar = f", must be {figure.must[rival]:g}" if rival in figure.must else ""
            factor = figure.factor(rival)
            print(f"       {rival}: {value:.3g} {figure.unit}, factor {factor:.3g}{bar}")
        for rival, reason in figure.absent.items():
            print(f"       {rival}: not measured, {reason}")
        for name, note in figure.notes.items():
            print(f"       {name}: {note if isinstance(note, str) else format(note, '.3g')}")


def main(arguments: list[str]) -> int:
    """Run it; 1 if a bar is missed. The engine's counts must be right, or it raises."""
    parser = argparse.ArgumentParser(prog="python -m pynccl bench")
    parser.add_argument("--latency", action="store_true", help="issue, await, completion")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="the host engine's collectives against MPI and gloo",
    )
    for option, name in (("openmpi", peers.OPEN_MPI), ("mpich", peers.MPICH)):
        parser.add_argument(
            f"--{option}", dest=name, metavar="PYTHON", help=f"the one with mpi4py on {name}"
        )
    parser.add_argument("--gloo", dest=peers.GLOO, metavar="PYTHON", help="the one with torch")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9, help="medians of so many (9)")
    parser.add_argument("--only", help="figures whose name contains this")
    chosen = parser.parse_args(arguments)
    figures = []
    if chosen.latency or not chosen.peers:
        figures += latency.run(chosen.rounds, chosen.only)
    if chosen.peers:
        figures += peers.run(chosen.rounds, chosen.only, vars(chosen))
    if chosen.json:
        print(json.dumps([{**asdict(f), "passed": f.passed} for f in figures], indent=2))
    else:
        show(figures)
    return 0 if all(figure.passed for figure in figures) else 1
