"""A failure that nobody has asked for is reported once, when its Work is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from typing import Any

import numpy as np
import pytest
from cliques import abort, all_reduced, arrays, clique
from processes import run

import pynccl
from pynccl import AbortedError, DeadlineError, testing

Reports = list[dict[str, Any]]


@contextlib.contextmanager
def listening() -> Any:
    """What reaches the running loop's exception handler."""
    reports: Reports = []
    running = asyncio.get_running_loop()
    before = running.get_exception_handler()
    running.set_exception_handler(lambda _, context: reports.append(context))
    try:
        yield reports
    finally:
        running.set_exception_handler(before)


async def settle(reports: Reports | None = None) -> None:
    """Let the done list be drained, and what it says arrive: one report, or else none."""
    end = time.perf_counter() + (0.06 if reports is None else 2)
    while time.perf_counter() < end and not reports:
        gc.collect()
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)


async def expire(comm: Any, count: int = 1) -> list[Any]:
    """Operations whose deadline passes while nobody waits."""
    works = [comm.all_reduce(np.ones(4), timeout=0.03) for _ in range(count)]
    await asyncio.sleep(0.06)
    return works


async def test_it_is_reported_once(temper: str, loop: str) -> None:
    async with clique(2) as comms:
        with listening() as reports:
            works = await expire(comms[0])
            del works
            await settle()
            assert reports == []  # the device may still use its buffers
            await abort(comms)
            await settle(reports)
        assert len(reports) == 1
        assert isinstance(reports[0]["exception"], DeadlineError)
        assert "all_reduce (operation 1" in reports[0]["message"]
        assert "nobody" in reports[0]["message"]


async def test_one_report_for_all_that_one_failure_took_down(temper: str) -> None:
    async with clique(2) as comms:
        with listening() as reports:
            with testing.faults("op:remote=6,rank=0,call=1"):
                works = []
                with contextlib.suppress(pynccl.UsageError):  # it has failed already
                    for _ in range(3):
                        works += [comm.all_reduce(np.ones(4)) for comm in comms]
                await asyncio.sleep(0.15)
            del works
            await abort(comms)
            await settle(reports)
        assert len(reports) == 1, reports


@pytest.mark.parametrize("how", ["await", "exception", "result", "future", "late", "kept"])
async def test_a_failure_that_was_asked_for_is_not_reported(temper: str, how: str) -> None:
    async with clique(2) as comms:
        with listening() as reports:
            work = (await expire(comms[0]))[0]
            if how == "await":
                with pytest.raises(DeadlineError):
                    await work
            elif how == "exception":
                assert isinstance(work.exception(), DeadlineError)
            elif how == "result":
                with pytest.raises(DeadlineError):
                    work.result()
            elif how == "future":
                assert isinstance(work.future().exception(), DeadlineError)
            await abort(comms)
            await settle()
            if how == "late":  # it is let go of already, and ready to tell
                assert isinstance(work.exception(), DeadlineError)
            if how != "kept":
                del work
                await settle()
            assert reports == []
            if how == "kept":
                del work
                await settle(reports)
                assert len(reports) == 1


async def test_what_is_aborted_here_is_not_reported(temper: str) -> None:
    async with clique(2) as comms:
        with listening() as reports:
            comms[0].all_reduce(np.ones(4))
            await abort(comms)
            await settle()
        assert reports == []


async def test_success_is_not_reported(temper: str) -> None:
    async with clique(2) as comms:
        with listening() as reports:
            for comm, x in zip(comms, arrays(comms), strict=True):
                comm.all_reduce(x)
            await all_reduced(comms)
            await settle()
        assert reports == []


async def test_an_await_that_was_given_up_still_hears_of_it(temper: str) -> None:
    """Who stops waiting does not ask: the failure behind it is reported."""
    async with clique(2) as comms:
        with listening() as reports:
            work = comms[0].all_reduce(np.ones(4), timeout=0.1)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(work.future(), 0.02)
            del work
            await asyncio.sleep(0.12)
            await abort(comms)
            await settle(reports)
        assert [type(report["exception"]) for report in reports] == [DeadlineError]


def test_without_a_loop_it_goes_to_the_log(
    temper: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> list[Any]:
        comms = await pynccl.create_all(["cpu:0", "cpu:1"])
        work = (await expire(comms[0]))[0]
        await abort(comms)
        return [work]

    works = asyncio.run(leave())
    assert not isinstance(works[0], AbortedError)
    with caplog.at_level(logging.ERROR, "pynccl"):
        works.clear()
        gc.collect()
    assert len(caplog.records) == 1
    assert "all_reduce (operation 1" in caplog.records[0].message
    assert caplog.records[0].exc_info is not None


def test_it_never_raises(temper: str) -> None:
    """A handler that raises, or an interpreter that goes: a finaliser has nobody to tell."""
    ended = run(
        """
def wrong(loop, context):
    print("told", flush=True)
    raise ValueError

async def main():
    global kept
    asyncio.get_running_loop().set_exception_handler(wrong)
    comms = await made()
    for last in (False, True):
        work = comms[last].all_reduce(np.ones(4), timeout=0.03)
        await asyncio.sleep(0.06)
        await comms[last].abort()
        kept = work if last else None
        del work
        await asyncio.sleep(0.05)

logger = __import__("logging").getLogger("asyncio")
logger.setLevel("CRITICAL")
asyncio.run(main())
""",
        "-Wignore",
        temper=temper,
    )
    assert ended.status == 0, ended.errors
    assert ended.output == "told\n", ended
