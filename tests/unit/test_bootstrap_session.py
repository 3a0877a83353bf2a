"""What a session does once all have come: reports, losses, questions, the goodbye."""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from support.meeting import close, free_port, meet, outcomes, run, tcp, until

from pynccl._bootstrap import Session
from pynccl.errors import BootstrapError, DeadlineError


async def three() -> list[Session]:
    return await meet(3, tcp(free_port()))


# report


def test_a_report_waits_for_all_ranks() -> None:
    async def main() -> None:
        sessions = await three()
        early = [asyncio.ensure_future(sessions[n].report(True)) for n in (0, 1)]
        done, _ = await asyncio.wait(early, timeout=0.1)
        assert not done
        await sessions[2].report(True)
        await asyncio.gather(*early)
        for _ in range(3):  # and again: the n-th reports belong together
            await asyncio.gather(*(session.report(True) for session in sessions))
        await close(*sessions)

    run(main)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_failed_is_named_to_the_others_at_once(failing: int) -> None:
    async def main() -> None:
        sessions = await three()
        others = [s for s in sessions if s.rank != failing]
        waiting = asyncio.ensure_future(others[0].report(True))
        await asyncio.sleep(0.02)
        start = time.monotonic()
        await sessions[failing].report(False, "out of memory")  # raises nothing: it knows
        # The second of the others has not reported yet, and must learn all the same.
        for report in (waiting, others[1].report(True)):
            with pytest.raises(BootstrapError, match=f"rank {failing} failed: out of memory"):
                await report
        assert time.monotonic() - start < 0.5
        await asyncio.gather(*(session.report(True) for session in sessions))
        await close(*sessions)

    run(main)


@pytest.mark.parametrize("vanishing", [0, 1])
def test_a_rank_that_vanishes_before_its_report_is_named_at_once(vanishing: int) -> None:
    async def main() -> None:
        sessions = await three()
        others = [s for s in sessions if s.rank != vanishing]
        reports = [asyncio.ensure_future(s.report(True)) for s in others]
        await asyncio.sleep(0.02)
        start = time.monotonic()
        sessions[vanishing].abandon()
        for error in await asyncio.gather(*reports, return_exceptions=True):
            assert isinstance(error, BootstrapError)
            assert f"rank {vanishing} was lost" in str(error)
        assert time.monotonic() - start < 0.5
        with pytest.raises(BootstrapError, match=f"rank {vanishing} was lost"):
            await others[0].report(True)
        await close(*sessions)

    run(main)


def test_a_rank_that_closes_instead_of_reporting_is_named() -> None:
    async def main() -> None:
        sessions = await three()
        reports = [asyncio.ensure_future(s.report(True)) for s in sessions[:2]]
        await asyncio.sleep(0.02)
        await sessions[2].close()
        for error in await asyncio.gather(*reports, return_exceptions=True):
            assert isinstance(error, BootstrapError)
            assert "rank 2 has closed" in str(error)
        await close(*sessions)

    run(main)


def test_a_report_has_a_deadline_that_names_the_silent_ranks() -> None:
    async def main() -> None:
        sessions = await three()
        start = time.monotonic()
        found = await asyncio.gather(
            sessions[0].report(True, timeout=30.0),
            sessions[1].report(True, timeout=0.3),
            return_exceptions=True,
        )
        assert time.monotonic() - start == pytest.approx(0.3, abs=0.4)
        for error in found:
            assert isinstance(error, DeadlineError)
            assert error.missing == (2,)
            assert error.operation == "report"
        assert not any(session.lost for session in sessions)
        await close(*sessions)

    run(main)


def test_a_cancelled_report_leaves_the_session_usable() -> None:
    async def main() -> None:
        sessions = await three()
        waiting = asyncio.ensure_future(sessions[0].report(True))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await outcomes(waiting)  # type: ignore[arg-type]
        await asyncio.gather(*(s.report(True) for s in sessions[1:]))
        await asyncio.gather(*(session.report(True) for session in sessions))
        await close(*sessions)

    run(main)


# losses


@pytest.mark.parametrize("vanishing", [0, 2])
def test_a_loss_is_told_to_every_other_rank(vanishing: int) -> None:
    async def main() -> None:
        sessions = await three()
        told: list[tuple[int, tuple[int, ...], str]] = []
        for s in sessions:
            s.on_lost(lambda ranks, reason, r=s.rank: told.append((r, ranks, reason)))
        sessions[vanishing].abandon()
        assert await until(lambda: len(told) == 2)
        assert sorted(rank for rank, _, _ in told) == [n for n in range(3) if n != vanishing]
        assert {ranks for _, ranks, _ in told} == {(vanishing,)}
        assert all(f"rank {vanishing}" in reason for _, _, reason in told)
        assert sessions[1].lost == (vanishing,)
        await close(*sessions)
        assert len(told) == 2

    run(main)


def test_a_loss_before_on_lost_is_told_right_after_it() -> None:
    async def main() -> None:
        sessions = await three()
        sessions[1].abandon()
        assert await until(lambda: sessions[0].lost and sessions[2].lost)
        told: list[tuple[int, ...]] = []
        for session in (sessions[0], sessions[2]):
            session.on_lost(lambda ranks, _: told.append(ranks))
        assert await until(lambda: told == [(1,), (1,)])
        await close(*sessions)

    run(main)


def test_a_goodbye_is_no_loss() -> None:
    async def main() -> None:
        sessions = await three()
        told: list[object] = []
        for session in sessions:
            session.on_lost(lambda *loss: told.append(loss))
        await sessions[2].close()
        assert sessions[0].is_watching
        await sessions[0].close()
        assert await until(lambda: not sessions[1].is_watching)
        await sessions[1].close()
        await asyncio.sleep(0.05)
        assert told == []

    run(main)


# questions


def test_a_question_is_answered_by_all_who_can() -> None:
    def broken() -> str:
        raise ValueError("no idea")

    async def main() -> None:
        sessions = await three()
        sessions[0].on_ask(lambda: "all_reduce #7")
        sessions[1].on_ask(lambda: "all_reduce #6")
        sessions[2].on_ask(broken)
        for asker in sessions:
            answers = await asker.ask(1.0)
            assert answers == {
                0: "all_reduce #7",
                1: "all_reduce #6",
                2: "ValueError: no idea",
            }
        sessions[1].abandon()
        assert await until(lambda: sessions[2].lost)
        assert sorted(await sessions[2].ask(1.0)) == [0, 2]
        await close(*sessions)
        assert await sessions[2].ask(1.0) == {2: "ValueError: no idea"}

    run(main)


def test_questions_of_several_ranks_at_once_do_not_mix() -> None:
    async def main() -> None:
        sessions = await meet(4, tcp(free_port()))
        for session in sessions:
            session.on_ask(lambda r=session.rank: str(r))  # type: ignore[misc]
        found = await asyncio.gather(*(s.ask(2.0) for s in sessions for _ in range(5)))
        assert found == [{n: str(n) for n in range(4)}] * 20
        await close(*sessions)

    run(main)


# the end


def test_close_is_quick_when_all_close_and_bounded_when_they_do_not() -> None:
    async def main() -> None:
        sessions = await three()
        start = time.monotonic()
        await close(*sessions)
        assert time.monotonic() - start < 0.5
        await close(*sessions)  # again does nothing
        sessions = await three()
        start = time.monotonic()
        await sessions[0].close()
        assert 0.5 < time.monotonic() - start < 1.5
        await close(*sessions)

    run(main)


def test_a_cancelled_close_still_closes() -> None:
    async def main() -> None:
        sessions = await three()
        closing = asyncio.ensure_future(sessions[0].close())
        await asyncio.sleep(0.05)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await close(*sessions)

    run(main)


def test_everything_is_harmless_after_the_end() -> None:
    async def main() -> None:
        sessions = await three()
        sessions[1].abandon()
        sessions[1].abandon()
        await sessions[1].close()
        with pytest.raises(BootstrapError, match="abandoned"):
            await sessions[1].report(True, timeout=math.inf)
        assert await sessions[1].ask(1.0) == {1: ""}
        await close(*sessions)

    run(main)
