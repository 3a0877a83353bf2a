"""Rank 0's side: a table of who has come, and who is still there.

The hub runs on rank 0's loop and has no task: connections call it, and rank 0's own `join`
waits for what they change. Its states follow each other: gathering, deciding (all are here,
rank 0 makes the payload), watching; and from the first two, failed.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pynccl._bootstrap.channel import Channel
from pynccl._bootstrap.door import Arrival
from pynccl._bootstrap.frames import Frame, FrameError, Kind, pack
from pynccl._bootstrap.verdict import Verdict, VerdictReached, name_ranks
from pynccl._bootstrap.waiting import Deadline
from pynccl._bootstrap.watch import Watch

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""How long a rank whose connection broke after its HELLO may take to come again."""
LATE_SECONDS = 2.0
"""How long a failed attempt stays up to tell the ranks that have not come yet."""
GOODBYE_SECONDS = 1.0
"""How long rank 0 waits at the end for the others to leave first."""
DISMISS_SECONDS = 0.3
"""How long a rank that was told of the failure may take to hang up."""


class State(enum.Enum):
    """Where the attempt stands."""

    GATHERING = enum.auto()
    DECIDING = enum.auto()
    WATCHING = enum.auto()
    FAILED = enum.auto()
    CLOSED = enum.auto()


@dataclass
class Member:
    """A rank that has said HELLO; `channel` is None for rank 0 itself."""

    arrival: Arrival
    channel: Channel | None


class Hub:
    """Gather the ranks, give out the payload, then watch."""

    def __init__(self, own: Arrival, deadline: Deadline, refused: list[str]) -> None:
        """Seat rank 0; `refused` is the list of the door, for the final message."""
        self._size = own.size
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._refused = refused
        self._state = State.GATHERING
        self._members: dict[int, Member] = {0: Member(own, None)}
        self._grace: dict[int, asyncio.TimerHandle] = {}
        self._broken: dict[int, str] = {}
        self._verdict: Verdict | None = None
        self._dismissed: set[Channel] = set()
        self._heard: set[int] = {0}
        self._stir: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._hurry(own, deadline.left())
        self.watch = Watch(own.size, self._tell)
        self.deliver: Callable[[Frame], None] | None = None

    # gathering

    def let_in(self, arrival: Arrival, channel: Channel) -> None:
        """Take a proved peer: seat it, or fail the attempt because of it."""
        if self._state is not State.GATHERING:
            late = Verdict(f"rank {arrival.rank} came after all ranks had come")
            self._dismiss(arrival.rank, channel, self._verdict or late)
            return
        seated = self._members.get(arrival.rank)
        again = seated is not None and seated.arrival.ticket == arrival.ticket
        if (objection := None if again else self._objection(arrival)) is not None:
            self.fail(objection)
            self._dismiss(arrival.rank, channel, objection)
            return
        if (timer := self._grace.pop(arrival.rank, None)) is not None:
            timer.cancel()
        self._members[arrival.rank] = Member(arrival, channel)
        if seated is not None and seated.channel is not None:
            seated.channel.abort("replaced by a newer connection")
        channel.send(Kind.NOTED)
        channel.listen(partial(self._from, arrival.rank), partial(self._end, arrival, channel))
        self._hurry(arrival, arrival.seconds)
        self._wake()

    def _objection(self, arrival: Arrival) -> Verdict | None:
        rank, where = arrival.rank, _where(arrival)
        if arrival.size != self._size:
            return Verdict(
                f"rank {rank}{where} was started as one of {arrival.size} ranks, "
                f"rank 0{_where(self._members[0].arrival)} as one of {self._size}",
                (0, rank),
            )
        if not 0 <= rank < self._size:
            return Verdict(f"rank {rank}{where} is not in 0 to {self._size - 1}", (rank,))
        if rank in self._members:
            first = _where(self._members[rank].arrival)
            return Verdict(
                f"rank {rank} came twice: {first.strip()} and {where.strip()}", (rank,)
            )
        return None

    async def gathered(self) -> list[dict[str, str]]:
        """Wait until all ranks are here; return their hellos in rank order."""
        await self._until(lambda: self._failed or len(self._members) == self._size)
        self.raise_if_failed()
        self._state = State.DECIDING
        return [dict(self._members[rank].arrival.hello) for rank in range(self._size)]

    async def guarded(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await something of rank 0's; give it up as soon as the attempt has failed."""
        self.raise_if_failed()
        task = asyncio.ensure_future(call())
        task.add_done_callback(lambda _: self._wake())
        try:
            await self._until(lambda: self._failed or task.done())
            self.raise_if_failed()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if not task.cancelled():
                task.exception()

    def start(self, hellos: list[dict[str, str]], payload: bytes) -> None:
        """Give hellos and payload to all; from now on only watch."""
        self._state = State.WATCHING
        self._cancel_timers()
        peers = pack({"hellos": hellos})
        for member in self._members.values():
            if member.channel is not None:
                member.channel.send(Kind.PEERS, peers)
                member.channel.send(Kind.START, payload)

    # failing

    def fail(self, verdict: Verdict) -> None:
        """End the attempt and tell all who are here; later arrivals are told as they come."""
        if self._state not in (State.GATHERING, State.DECIDING):
            return
        self._state, self._verdict = State.FAILED, verdict
        self._cancel_timers()
        for rank, member in self._members.items():
            if member.channel is not None:
                self._dismiss(rank, member.channel, verdict)
        self._wake()

    async def farewell(self, *, more_may_come: bool) -> None:
        """Stay until all have heard the verdict; bounded by LATE_SECONDS."""
        if more_may_come:
            wait = min(LATE_SECONDS, self._deadline.left())
            await self._until(lambda: len(self._heard) >= self._size, wait)
        await self._until(lambda: not self._dismissed, DISMISS_SECONDS)

    def _dismiss(self, rank: int, channel: Channel, verdict: Verdict) -> None:
        if channel.is_open:
            self._dismissed.add(channel)
            channel.send(Kind.FAIL, verdict.body())
            channel.listen(lambda _: None, partial(self._hung_up, channel))
        self._heard.add(rank)
        self._wake()

    def _hung_up(self, channel: Channel, _reason: str) -> None:
        self._dismissed.discard(channel)
        self._wake()

    def raise_if_failed(self) -> None:
        """Raise `VerdictReached` if the attempt has failed."""
        if self._verdict is not None:
            raise VerdictReached(self._verdict)

    @property
    def _failed(self) -> bool:
        return self._state is State.FAILED

    def _hurry(self, arrival: Arrival, seconds: float) -> None:
        """Fail when the first rank's patience ends: without that rank nobody can succeed."""
        if math.isinf(seconds):
            return
        when = self._loop.time() + max(0.0, seconds)
        if self._timer is None or when < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(when, self._expire, arrival.rank)

    def _expire(self, impatient: int) -> None:
        whose = "" if impatient == 0 else f" (the timeout of rank {impatient} was the first)"
        after = f"{self._deadline.elapsed():.1f} s{whose}"
        missing = tuple(rank for rank in range(self._size) if rank not in self._members)
        if not missing:
            self.fail(Verdict(f"rank 0 was not ready to start after {after}", (0,), late=True))
            return
        text = f"{name_ranks(missing)} of {self._size} had not come after {after}"
        broken = [f"rank {r}: {self._broken[r]}" for r in missing if r in self._broken]
        if broken:
            text += f"; came and went: {', '.join(broken)}"
        if self._refused:
            text += f"; refused: {'; '.join(self._refused)}"
        self.fail(Verdict(text, missing, late=True))

    # what connections say

    def _from(self, rank: int, frame: Frame) -> None:
        if frame.kind is Kind.BYE:
            self._bye(rank, frame)
        elif self._state is State.WATCHING:
            self.watch.receive(rank, frame)
        else:
            raise FrameError(f"{frame.kind.name} out of turn")

    def _bye(self, rank: int, frame: Frame) -> None:
        member = self._members.pop(rank)
        if self._state is State.WATCHING:
            self.watch.left(rank)
        else:
            self.fail(Verdict(f"rank {rank} gave up: {frame.json().get('reason')}", (rank,)))
        if member.channel is not None:
            member.channel.part(Kind.BYE)
        self._wake()

    def _end(self, arrival: Arrival, channel: Channel, reason: str) -> None:
        rank = arrival.rank
        member = self._members.get(rank)
        if member is None or member.channel is not channel:
            return
        del self._members[rank]
        if self._state is State.GATHERING:
            self._broken[rank] = reason
            self._grace[rank] = self._loop.call_later(GRACE_SECONDS, self._vanished, rank)
        elif self._state is State.WATCHING:
            self.watch.lost(rank, f"rank {rank}{_where(arrival)}: {reason}")
        else:
            self._broken[rank] = reason
            self._vanished(rank)
        self._wake()

    def _vanished(self, rank: int) -> None:
        self.fail(Verdict(f"rank {rank} came and vanished: {self._broken[rank]}", (rank,)))

    # watching: the link of rank 0's own session

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Take a frame of rank 0's session."""
        self.watch.receive(0, Frame(kind, body))

    async def leave(self) -> None:
        """Wait a little for the others to leave first, then end the watch."""
        await self._until(lambda: len(self._members) == 1, GOODBYE_SECONDS)
        members, self._members = self._members, {}
        for member in members.values():
            if member.channel is not None:
                member.channel.part(Kind.BYE)
        self.cut()

    def cut(self) -> None:
        """Drop every connection now."""
        self._state = State.CLOSED
        members, self._members = self._members, {}
        for member in members.values():
            if member.channel is not None:
                member.channel.abort()
        for channel in self._dismissed:
            channel.retire()
        self._dismissed.clear()
        self._cancel_timers()
        self.watch.stop()

    def _tell(self, rank: int, kind: Kind, body: bytes) -> None:
        if rank == 0:
            if self.deliver is not None:
                self.deliver(Frame(kind, body))
        elif (member := self._members.get(rank)) is not None and member.channel is not None:
            member.channel.send(kind, body)

    # waiting

    async def _until(self, is_true: Callable[[], bool], seconds: float = math.inf) -> None:
        """Wait until a change makes `is_true` true, or for `seconds`. One waiter at a time."""
        end = self._loop.time() + seconds
        while not is_true() and (left := end - self._loop.time()) > 0:
            self._stir = self._loop.create_future()
            timer = None if math.isinf(left) else self._loop.call_later(left, self._wake)
            try:
                await self._stir
            finally:
                if timer is not None:
                    timer.cancel()

    def _wake(self) -> None:
        if self._stir is not None and not self._stir.done():
            self._stir.set_result(None)

    def _cancel_timers(self) -> None:
        for timer in self._grace.values():
            timer.cancel()
        self._grace.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _where(arrival: Arrival) -> str:
    host, pid = arrival.hello.get("host"), arrival.hello.get("pid")
    parts = [f"host {host}"] if host else []
    parts += [f"pid {pid}"] if pid else []
    return f" ({', '.join(parts)})" if parts else ""
