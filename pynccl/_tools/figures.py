"""One figure of a benchmark, and how it is judged."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Figure:
    """One row: a figure of ours, its rivals' in the same run, and what the ratio must be.

    `ours` and `rivals` are medians, in `unit`. For times `factor` is rival / ours, for rates it
    is ours / rival; it must be `must` or more against each rival named there. A rival that is
    not installed is named in `absent`, with the reason.
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
            self.factor(rival) >= bar
            for rival, bar in self.must.items()
            if rival in self.rivals
        )


def medians(samples: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Each sampler called once a round, in turn, so that a drift of the machine meets all."""
    seen: dict[str, list[float]] = {name: [] for name in samples}
    for _ in range(rounds):
        for name, sample in samples.items():
            seen[name].append(sample())
    return {name: statistics.median(values) for name, values in seen.items()}
