"""From notes to verdicts: HOLDS, FAILS or NOT TRIED, for a case and for an assumption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .notes import Notes

HOLDS, FAILS, NOT_TRIED = "HOLDS", "FAILS", "NOT TRIED"


@dataclass(frozen=True)
class Ending:
    """How one rank's process ended: its status, None if it was killed, and its last output."""

    status: int | None
    hung: bool = False
    """It was killed because the deadline passed, not because another rank had ended."""
    output: str = ""


@dataclass
class CaseResult:
    """One case of an assumption, tried."""

    name: str
    verdict: str
    reason: str = ""
    measured: dict[str, Any] = field(default_factory=dict)
    claims: list[str] = field(default_factory=list)
    seconds: float = 0.0


def judge(name: str, notes: Sequence[Notes], endings: Sequence[Ending]) -> CaseResult:
    """The verdict over one case, from what its ranks wrote and how they ended.

    A claim that did not come true outweighs everything; then a crash or an error, a hang, a
    reason not to try. What is left holds, but only if something was checked at all.
    """
    result = CaseResult(name, FAILS, measured=_measured(notes))
    result.claims = [check.claim for note in notes for check in note.checks]
    if broken := [check for note in notes for check in note.checks if not check.ok]:
        result.reason = "; ".join(
            f"not so: {check.claim}" + (f" ({check.seen})" if check.seen else "")
            for check in broken
        )
    elif error := _error(notes, endings):
        result.reason = error
    elif hung := [at for at, ending in enumerate(endings) if ending.hung]:
        result.reason = "hung: " + "; ".join(f"rank {at} in {notes[at].step}" for at in hung)
    elif reasons := [note.reason for note in notes if note.end == "not tried"]:
        result.verdict, result.reason = NOT_TRIED, reasons[0]
    elif not result.claims:
        result.reason = "nothing was checked"
    else:
        result.verdict = HOLDS
    return result


def _measured(notes: Sequence[Notes]) -> dict[str, Any]:
    found = dict(notes[0].measured)
    for rank, note in enumerate(notes[1:], 1):
        found.update({f"rank{rank}_{name}": value for name, value in note.measured.items()})
    return found


def _error(notes: Sequence[Notes], endings: Sequence[Ending]) -> str:
    for rank, (note, ending) in enumerate(zip(notes, endings, strict=True)):
        where = f"rank {rank} in {note.step}"
        if note.end == "error":
            return f"{where}: {note.reason}"
        if ending.status is not None and (ending.status != 0 or note.end == ""):
            how = f"signal {-ending.status}" if ending.status < 0 else f"exit {ending.status}"
            return f"{where}: ended by {how} {ending.output}".rstrip()
    return ""


def combine(cases: Sequence[CaseResult]) -> str:
    """The verdict over an assumption: one failure fails it, and one success is needed."""
    verdicts = [case.verdict for case in cases]
    if FAILS in verdicts:
        return FAILS
    return HOLDS if HOLDS in verdicts else NOT_TRIED
