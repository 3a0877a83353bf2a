"""What is left of a rendezvous once all have come: a thread of talk between the ranks."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Protocol

from pynccl._bootstrap.channel import Channel
from pynccl._bootstrap.frames import Frame, FrameError, Kind, pack
from pynccl._bootstrap.hub import GOODBYE_SECONDS
from pynccl._bootstrap.verdict import Verdict
from pynccl._bootstrap.waiting import Deadline, Expired, within
from pynccl.errors import BootstrapError

log = logging.getLogger("pynccl.bootstrap")

OnLost = Callable[[tuple[int, ...], str], None]
SLACK_SECONDS = 0.3


class Link(Protocol):
    """A rank's way to the hub."""

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Queue a frame."""

    async def leave(self) -> None:
        """Say goodbye; at most about a second."""

    def cut(self) -> None:
        """End at once, without a word."""


class Spoke:
    """The link of every rank but 0."""

    def __init__(self, channel: Channel) -> None:
        """Use a connection that rank 0 has let in."""
        self._channel = channel

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Write to rank 0."""
        self._channel.send(kind, body)

    async def leave(self) -> None:
        """Say goodbye and wait for rank 0 to hang up."""
        self._channel.send(Kind.BYE, pack({"reason": "closed"}))
        try:
            await within(GOODBYE_SECONDS, self._channel.closed())
        except Expired:
            log.debug("rank 0 did not answer the goodbye")
        finally:
            self._channel.abort()

    def cut(self) -> None:
        """Drop the connection."""
        self._channel.abort()


class Session:
    """The control plane of one communicator; to be used on the loop that joined.

    `payload` is what rank 0 gave to all, `hellos` what each rank said of itself, in rank order.
    """

    def __init__(
        self, rank: int, size: int, hellos: list[dict[str, str]], payload: bytes
    ) -> None:
        """Start without a link, as the only rank; see `attach`."""
        self.rank = rank
        self.size = size
        self.hellos = tuple(hellos)
        self.payload = payload
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._over = ""
        self._round = 0
        self._verdicts: dict[int, asyncio.Future[Verdict | None]] = {}
        self._lost: dict[int, str] = {}
        self._on_lost: list[OnLost] = []
        self._on_ask: Callable[[], str] = str
        self._asked = 0
        self._answers: dict[int, asyncio.Future[dict[int, str]]] = {}

    def attach(self, link: Link) -> None:
        """Begin to talk over `link`."""
        self._link = link

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks whose connection ended without a goodbye, as far as is known here."""
        return tuple(sorted(self._lost))

    @property
    def is_watching(self) -> bool:
        """Whether a loss would be noticed: not after a close, nor after rank 0 has left."""
        return self._link is not None and not self._over

    # what the ranks agree on

    async def report(self, ok: bool, message: str = "", *, timeout: float = math.inf) -> None:
        """Say how a step went that all ranks take; return when it went well on all.

        The n-th report of each rank belongs together. `message` tells the others why it did not
        go well; the rank that says so gets no exception here: it has its own.

        Raises `BootstrapError` that names a rank as soon as it has failed, vanished or closed,
        and `DeadlineError` when the first of the ranks' time-outs (in seconds) has passed.
        """
        self._round += 1
        number, deadline = self._round, Deadline(timeout)
        verdict = self._verdicts.setdefault(number, self._loop.create_future())
        try:
            if self._link is None:
                return
            if self._over and not verdict.done():
                raise BootstrapError(f"no report is possible: {self._over}")
            seconds = None if math.isinf(timeout) else timeout
            value = {"round": number, "ok": ok, "message": message, "seconds": seconds}
            self._link.send(Kind.REPORT, pack(value))
            if not ok:
                await asyncio.sleep(0)  # uvloop writes at the end of the iteration
                return
            try:
                outcome = await within(timeout + SLACK_SECONDS, verdict)
            except Expired:
                silence = Verdict("rank 0 did not answer a report", (0,), late=True)
                raise silence.error("report", deadline.elapsed()) from None
        finally:
            del self._verdicts[number]
        if outcome is not None:
            raise outcome.error("report", deadline.elapsed())

    # what happens to the others

    def on_lost(self, callback: OnLost) -> None:
        """Call `callback(ranks, reason)` on the loop when ranks end without a goodbye.

        Losses before this call are told right after it.
        """
        self._on_lost.append(callback)
        for rank, reason in self._lost.items():
            self._loop.call_soon(self._call_lost, callback, rank, reason)

    def on_ask(self, answer: Callable[[], str]) -> None:
        """Answer the others' `ask` with what `answer()` returns; it must not block."""
        self._on_ask = answer

    async def ask(self, timeout: float) -> dict[int, str]:
        """Ask every rank for its answer; return what came within `timeout` seconds, by rank.

        Never raises for a rank that is silent or gone: it is absent from the result.
        """
        if self._link is None or self._over:
            return {self.rank: self._answer()}
        self._asked += 1
        number = self._asked
        answers = self._answers[number] = self._loop.create_future()
        self._link.send(Kind.ASK, pack({"survey": number, "seconds": timeout}))
        try:
            return await within(timeout + SLACK_SECONDS, answers)
        except Expired:
            return {self.rank: self._answer()}
        finally:
            self._answers.pop(number, None)

    # the end

    async def close(self) -> None:
        """Say goodbye; at most about a second, whatever the others do. May be repeated."""
        if self._link is None or self._over:
            return
        self._end("this rank has closed")
        try:
            await self._link.leave()
        finally:
            self._link.cut()

    def abandon(self) -> None:
        """End at once without a goodbye: the others will see this rank as lost."""
        if self._link is not None:
            self._end("this rank has abandoned the session")
            self._link.cut()

    # what the hub says

    def receive(self, frame: Frame) -> None:
        """Take a frame from the hub."""
        if self._over:
            return
        if frame.kind is Kind.VERDICT:
            value = frame.json()
            verdict = None if value.get("ok") is True else Verdict.read(frame)
            self._settle(value.get("round"), verdict)
        elif frame.kind is Kind.LOST:
            value = frame.json()
            for rank in value.get("ranks", ()):
                self._lose(int(rank), str(value.get("reason")))
        elif frame.kind is Kind.ASK:
            self._reply(frame.json().get("survey"))
        elif frame.kind is Kind.ANSWERS:
            self._answered(frame)
        elif frame.kind is Kind.BYE:
            self._end("rank 0 has closed")
            if self._link is not None:
                self._link.cut()
        else:
            raise FrameError(f"{frame.kind.name} out of turn")

    def cut_off(self, reason: str) -> None:
        """Rank 0 cannot be reached any more."""
        if not self._over:
            self._lose(0, f"rank 0: {reason}")
            self._end(f"rank 0 was lost ({reason})")

    def _end(self, reason: str) -> None:
        self._over = self._over or reason
        self._on_lost.clear()
        for verdict in self._verdicts.values():
            if not verdict.done():
                verdict.set_result(Verdict(reason))
        for answers in self._answers.values():
            if not answers.done():
                answers.set_result({})

    def _settle(self, number: object, verdict: Verdict | None) -> None:
        if type(number) is not int or number < self._round:
            return
        future = self._verdicts.setdefault(number, self._loop.create_future())
        if not future.done():
            future.set_result(verdict)

    def _lose(self, rank: int, reason: str) -> None:
        if rank in self._lost:
            return
        log.warning("lost %s", reason)
        self._lost[rank] = reason
        for callback in self._on_lost:
            self._loop.call_soon(self._call_lost, callback, rank, reason)

    def _call_lost(self, callback: OnLost, rank: int, reason: str) -> None:
        callback((rank,), reason)

    def _reply(self, survey: object) -> None:
        if self._link is not None:
            self._link.send(Kind.ANSWER, pack({"survey": survey, "text": self._answer()}))

    def _answer(self) -> str:
        try:
            return self._on_ask()
        except Exception as exc:
            log.exception("the answer to a question of the ranks failed")
            return f"{type(exc).__name__}: {exc}"

    def _answered(self, frame: Frame) -> None:
        value = frame.json()
        answers = self._answers.get(value.get("survey", 0))
        if answers is not None and not answers.done():
            answers.set_result({int(r): str(t) for r, t in value["answers"].items()})
