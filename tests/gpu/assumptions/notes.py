"""What one rank of a case finds out, kept in a file from step to step.

The file is written before each step that may hang: when the deadline passes it says what was
measured so far and what was being done.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Check:
    """One claim, whether it came true, and what was seen instead."""

    claim: str
    ok: bool
    seen: str = ""


@dataclass
class Notes:
    """A rank's findings; `end` says how it came out of its function, "" while it is inside."""

    step: str = "the start of the process"
    checks: list[Check] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    end: str = ""
    """"done", "not tried" or "error"."""
    reason: str = ""

    @classmethod
    def read(cls, path: Path) -> Notes:
        """What a rank has left in its file, which may not exist yet."""
        if not path.exists():
            return cls()
        raw = json.loads(path.read_text())
        raw["checks"] = [Check(**check) for check in raw["checks"]]
        return cls(**raw)


class Notebook:
    """The writing side of a rank's notes."""

    def __init__(self, path: Path) -> None:
        self.notes = Notes()
        self._path = path

    def doing(self, step: str) -> None:
        """Say what comes next, as it is to be read after "hung in"."""
        self.notes.step = step
        self._write()

    def measure(self, **values: Any) -> None:
        """Keep numbers or words for the report; a name ends in its unit (_us, _ms)."""
        self.notes.measured.update(values)
        self._write()

    def check(self, claim: str, ok: bool, seen: object = "") -> None:
        """Decide one claim; the verdict holds only if all of them do."""
        self.notes.checks.append(Check(claim, bool(ok), str(seen)))
        self._write()

    def close(self, end: str, reason: str = "") -> None:
        """Say how the rank came out."""
        self.notes.end, self.notes.reason = end, reason
        self._write()

    def _write(self) -> None:
        fresh = self._path.with_suffix(".fresh")
        fresh.write_text(json.dumps(asdict(self.notes)))
        fresh.replace(self._path)
