"""`python -m pynccl bench --latency`: what an operation costs, against its rivals in the same run."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field


@dataclass
class Figure:
    """One row: a figure of ours, its rivals' in the same run, and what the ratio must be.

    `ours` and `rivals` are medians, in `unit`. For times `factor` is rival / ours, for rates ours / rival; it must be
    `must` or more against each rival named there. A rival that is not installed is named in `absent`, with the reason.
    """

    name: str
    unit: str
    ours: float
    rivals: dict[str, float]
    must: dict[str, float]
    is_rate: bool = False
    absent: dict[str, str] = field(default_factory=dict)
    notes: dict[str, float | str] = field(default_factory=dict)

    def factor(self, rival: str) -> float:
        """How much better we are than a rival."""
        if self.is_rate:
            return self.ours / self.rivals[rival]
        return self.rivals[rival] / self.ours

    @property
    def passed(self) -> bool:
        """Whether every bar whose rival was there is reached."""
        return all(
            self.factor(rival) >= bar for rival, bar in self.must.items() if rival in self.rivals
        )


def medians(samples: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Each sampler called once a round, in turn, so that a drift of the machine meets all of them."""
    seen: dict[str, list[float]] = {name: [] for name in samples}
    for _ in range(rounds):
        for name, sample in samples.items():
            seen[name].append(sample())
    return {name: statistics.median(values) for name, values in seen.items()}


def show(figures: list[Figure]) -> None:
    """Print the table."""
    for figure in figures:
        mark = "ok  " if figure.passed else "MISS"
        print(f"{mark} {figure.name}: {figure.ours:.3g} {figure.unit}")
        for rival, value in figure.rivals.items():
            bar = f", must be {figure.must[rival]:g}" if rival in figure.must else ""
            print(
                f"       {rival}: {value:.3g} {figure.unit}, factor {figure.factor(rival):.3g}{bar}"
            )
        for rival, reason in figure.absent.items():
            print(f"       {rival}: not measured, {reason}")
        for name, note in figure.notes.items():
            print(f"       {name}: {note if isinstance(note, str) else format(note, '.3g')}")


def main(arguments: list[str]) -> int:
    """Run the benchmark; 1 if a bar is missed or the engine's counts are not what they must be."""
    parser = argparse.ArgumentParser(prog="python -m pynccl bench")
    parser.add_argument("--latency", action="store_true", help="issue, await, completion")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9, help="medians of so many (9)")
    parser.add_argument("--only", help="figures whose name contains this")
    chosen = parser.parse_args(arguments)
    from pynccl._tools import latency

    figures = latency.run(chosen.rounds, chosen.only)
    if chosen.json:
        print(json.dumps([{**asdict(f), "passed": f.passed} for f in figures], indent=2))
    else:
        show(figures)
    return 0 if all(figure.passed for figure in figures) else 1
