"""What rank 0 relays once all have started: reports, losses, questions. No sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pynccl._bootstrap.frames import Frame, FrameError, Kind, pack
from pynccl._bootstrap.verdict import Verdict, name_ranks


@dataclass
class Round:
    """One report that all ranks make: who has said that all is well, and the timers."""

    well: set[int] = field(default_factory=set)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    began: float = 0.0


@dataclass
class Survey:
    """One question of one rank to all: who has still to answer, and what came."""

    asker: int
    number: int
    waiting: set[int]
    answers: dict[int, str] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class Watch:
    """The state behind `Session.report`, `on_lost` and `ask`, for all ranks."""

    def __init__(self, size: int, tell: Callable[[int, Kind, bytes], None]) -> None:
        """Send with `tell(rank, kind, body)`, which ignores a rank that has gone."""
        self._size = size
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._gone: dict[int, str] = {}
        self._rounds: dict[int, Round] = {}
        self._decided: set[int] = set()
        self._surveys: dict[int, Survey] = {}
        self._surveyed = 0

    def receive(self, rank: int, frame: Frame) -> None:
        """Take a frame of a rank; raise `FrameError` if it makes no sense here."""
        value = frame.json()
        if frame.kind is Kind.REPORT:
            self._report(rank, value)
        elif frame.kind is Kind.ASK:
            self._ask(rank, value)
        elif frame.kind is Kind.ANSWER:
            self._answer(rank, _number(value, "survey"), str(value.get("text", "")))
        else:
            raise FrameError(f"{frame.kind.name} out of turn")

    def lost(self, rank: int, reason: str) -> None:
        """Tell all that a rank's connection ended without a goodbye."""
        body = pack({"ranks": [rank], "reason": reason})
        self._gone[rank] = f"was lost ({reason})"
        for other in self._present():
            self._tell(other, Kind.LOST, body)
        self._without(rank)

    def left(self, rank: int) -> None:
        """Note that a rank said goodbye; whoever waits for it is told."""
        self._gone[rank] = "has closed"
        self._without(rank)

    def stop(self) -> None:
        """Cancel all timers."""
        for round_ in self._rounds.values():
            for timer in round_.timers:
                timer.cancel()
        for survey in self._surveys.values():
            if survey.timer is not None:
                survey.timer.cancel()

    def _present(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._gone]

    def _without(self, rank: int) -> None:
        verdict = Verdict(f"rank {rank} {self._gone[rank]}", (rank,))
        for number, round_ in list(self._rounds.items()):
            if rank not in round_.well:
                self._decide(number, verdict)
        for key, survey in list(self._surveys.items()):
            survey.waiting.discard(rank)
            self._finish_if_complete(key)

    # reports

    def _report(self, rank: int, value: dict[str, Any]) -> None:
        number = _number(value, "round")
        if number in self._decided:
            return
        round_ = self._rounds.setdefault(number, Round(began=self._loop.time()))
        if value.get("ok") is not True:
            text = f"rank {rank} failed: {value.get('message') or 'it gave no reason'}"
            self._decide(number, Verdict(text, (rank,)))
            return
        round_.well.add(rank)
        for absent, how in self._gone.items():
            if absent not in round_.well:
                self._decide(number, Verdict(f"rank {absent} {how}", (absent,)))
                return
        if len(round_.well) == self._size:
            self._decide(number, None)
            return
        seconds = _seconds(value)
        if not math.isinf(seconds):
            round_.timers.append(self._loop.call_later(seconds, self._expire, number, rank))

    def _expire(self, number: int, impatient: int) -> None:
        round_ = self._rounds[number]
        missing = tuple(rank for rank in range(self._size) if rank not in round_.well)
        text = (
            f"{name_ranks(missing)} of {self._size} had not reported "
            f"{self._loop.time() - round_.began:.1f} s after the first that did "
            f"(the timeout of rank {impatient} was the first)"
        )
        self._decide(number, Verdict(text, missing, late=True))

    def _decide(self, number: int, verdict: Verdict | None) -> None:
        for timer in self._rounds.pop(number).timers:
            timer.cancel()
        self._decided.add(number)
        if verdict is None:
            body = pack({"round": number, "ok": True})
        else:
            body = verdict.body(round=number, ok=False)
        for rank in self._present():
            self._tell(rank, Kind.VERDICT, body)

    # questions

    def _ask(self, rank: int, value: dict[str, Any]) -> None:
        self._surveyed += 1
        key = self._surveyed
        survey = Survey(rank, _number(value, "survey"), set(self._present()))
        self._surveys[key] = survey
        seconds = _seconds(value)
        if not math.isinf(seconds):
            survey.timer = self._loop.call_later(seconds, self._finish, key)
        for other in self._present():
            self._tell(other, Kind.ASK, pack({"survey": key}))

    def _answer(self, rank: int, key: int, text: str) -> None:
        survey = self._surveys.get(key)
        if survey is not None and rank in survey.waiting:
            survey.waiting.discard(rank)
            survey.answers[rank] = text
            self._finish_if_complete(key)

    def _finish_if_complete(self, key: int) -> None:
        if not self._surveys[key].waiting:
            self._finish(key)

    def _finish(self, key: int) -> None:
        survey = self._surveys.pop(key)
        if survey.timer is not None:
            survey.timer.cancel()
        answers = {str(rank): text for rank, text in survey.answers.items()}
        body = pack({"survey": survey.number, "answers": answers})
        self._tell(survey.asker, Kind.ANSWERS, body)


def _number(value: dict[str, Any], name: str) -> int:
    number = value.get(name)
    if type(number) is not int:
        raise FrameError(f"{name} is no number")
    return number


def _seconds(value: dict[str, Any]) -> float:
    seconds = value.get("seconds")
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return math.inf
    return max(0.0, float(seconds))
