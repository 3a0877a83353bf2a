"""The questions and answers over MPI, on an MPI that is as lazy as the standard allows."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
from support.meeting import run

from pynccl._bootstrap import mpi
from pynccl._bootstrap.address import Endpoint

OLD = Endpoint(("10.0.0.1",), 4000, b"o" * 16, "old")
NEW = Endpoint(("10.0.0.2",), 4001, b"n" * 16, "new")


class Wire:
    """What is under way: (from, to, tag, bytes). A send goes out at its sender's third call."""

    def __init__(self) -> None:
        self.held: list[tuple[int, int, int, bytes]] = []
        self.arrived: list[tuple[int, int, int, bytes]] = []
        self.calls = 0

    def called_by(self, rank: int) -> None:
        mine = [message for message in self.held if message[0] == rank]
        self.calls += bool(mine)
        if self.calls == 3:
            self.calls = 0
            self.arrived += mine
            self.held = [message for message in self.held if message[0] != rank]


class Status:
    """What MPI says about a message."""

    source = 0
    count = 0

    def Get_source(self) -> int:
        return self.source

    def Get_count(self, _datatype: object) -> int:
        return self.count


class Request:
    """A send; complete at the second look."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank, self.looks = wire, rank, 0

    def Test(self) -> bool:
        self.wire.called_by(self.rank)
        self.looks += 1
        return self.looks > 1


class Comm:
    """One rank's communicator; its module too, for the constants."""

    ANY_SOURCE, BYTE, Status = -1, "byte", Status

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank

    def _match(self, source: int, tag: int) -> tuple[int, int, int, bytes] | None:
        for message in self.wire.arrived:
            if message[1] == self.rank and message[2] == tag and source in (-1, message[0]):
                return message
        return None

    def Iprobe(self, source: int, tag: int, status: Status) -> bool:
        self.wire.called_by(self.rank)
        message = self._match(source, tag)
        if message is not None:
            status.source, status.count = message[0], len(message[3])
        return message is not None

    def Recv(self, buffer: list[Any], source: int, tag: int) -> None:
        message = self._match(source, tag)
        assert message is not None, "a receive that would block"
        self.wire.arrived.remove(message)
        buffer[0][:] = message[3]

    def Isend(self, buffer: list[Any], dest: int, tag: int) -> Request:
        self.wire.called_by(self.rank)
        self.wire.held.append((self.rank, dest, tag, bytes(buffer[0])))
        return Request(self.wire, self.rank)


def step(steps: Generator[None, None, Any]) -> Any:
    """Take one step; return the result at the end, None before."""
    try:
        next(steps)
    except StopIteration as stop:
        return stop.value
    return None


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """An MPI of two ranks; `at` makes the next steps those of one of them."""
    wire = Wire()
    monkeypatch.setattr(mpi, "_unfinished", [])
    return wire


def at(wire: Wire, rank: int, monkeypatch: pytest.MonkeyPatch) -> mpi.MpiBoard:
    """Return the board of a rank, with a lazy communicator."""
    board = mpi.MpiBoard(rank=rank, size=2)

    def world() -> Generator[None, None, tuple[Comm, Comm]]:
        yield
        return Comm(wire, rank), Comm(wire, rank)

    monkeypatch.setattr(mpi, "_world", world)
    return board


def test_rank_0_keeps_mpi_going_until_its_answers_are_out(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        client = at(wire, 1, monkeypatch)._ask()
        for _ in range(5):
            step(client)
        assert len(wire.arrived) == 1
        server_board = at(wire, 0, monkeypatch)
        server = server_board._serve(NEW.dump())
        step(server)
        step(server)  # takes the question, and has the answer still in its hands
        assert [message[1] for message in wire.held] == [1]
        server_board._stop.set()
        list(server)
        assert wire.held == []
        assert step(client) == NEW
        assert [request for request, _ in mpi._unfinished if request.rank == 0] == []

    run(main)


def test_an_answer_to_an_older_question_is_dropped(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        wire.arrived.append((0, 1, mpi.TAG_ANSWER, b"t" * mpi.TICKET_BYTES + OLD.dump()))
        client = at(wire, 1, monkeypatch)._ask()
        for _ in range(5):
            assert step(client) is None
        server = at(wire, 0, monkeypatch)._serve(NEW.dump())
        for _ in range(5):
            step(server)
        assert step(client) == NEW

    run(main)


def test_a_question_that_is_given_up_keeps_its_buffer_for_mpi(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        client = at(wire, 1, monkeypatch)._ask()
        step(client)
        step(client)
        client.close()
        [(request, ticket)] = mpi._unfinished
        assert isinstance(request, Request)
        assert len(ticket) == mpi.TICKET_BYTES
        await asyncio.sleep(0)

    run(main)
