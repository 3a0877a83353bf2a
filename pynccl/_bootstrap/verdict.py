"""How an agreement failed: one sentence that every rank raises alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pynccl._bootstrap.frames import Frame, pack
from pynccl.errors import BootstrapError, DeadlineError


@dataclass(frozen=True)
class Verdict:
    """The failure of a rendezvous or of a report, as it goes over the wire.

    `ranks` are those at fault; `late` says that they did not come in time.
    """

    text: str
    ranks: tuple[int, ...] = ()
    late: bool = False

    def body(self, **more: object) -> bytes:
        """Return the body of a frame that carries the verdict."""
        return pack({"text": self.text, "ranks": list(self.ranks), "late": self.late, **more})

    @classmethod
    def read(cls, frame: Frame) -> Verdict:
        """Read a verdict's frame leniently: a failure is never lost for a missing field."""
        value = frame.json()
        ranks = value.get("ranks")
        return cls(
            str(value.get("text", "rank 0 gave no reason")),
            tuple(r for r in ranks if type(r) is int) if isinstance(ranks, list) else (),
            value.get("late") is True,
        )

    def error(self, operation: str, elapsed: float) -> BootstrapError | DeadlineError:
        """Return the exception to raise; `elapsed` is this rank's own, in seconds."""
        if self.late:
            return DeadlineError(
                self.text, operation=operation, elapsed=elapsed, missing=self.ranks
            )
        return BootstrapError(self.text, missing=self.ranks)


class VerdictReached(Exception):  # carries a verdict up to where it is raised
    """The agreement has failed."""

    def __init__(self, verdict: Verdict) -> None:
        """Keep the verdict."""
        super().__init__(verdict.text)
        self.verdict = verdict


def name_ranks(ranks: Iterable[int], most: int = 16) -> str:
    """Write "rank 3", "ranks 1, 2" or "ranks 0, 1, ... (900 in all)"."""
    ordered = sorted(ranks)
    shown = ", ".join(str(rank) for rank in ordered[:most])
    if len(ordered) > most:
        shown += f", ... ({len(ordered)} in all)"
    return f"rank {shown}" if len(ordered) == 1 else f"ranks {shown}"
