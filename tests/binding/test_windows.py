"""comm.register_window, and what goes through windows: put, signal, wait_signal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from cliques import abort, all_reduced, clique, gone, reduce_all

import pynccl
from pynccl import ConfigError, InvalidBufferError, NotSupportedError, UsageError, testing

pytestmark = pytest.mark.usefixtures("no_garbage")

CALLS = ("ncclCommWindowRegister", "ncclCommWindowDeregister")
COUNT = 1024


@contextlib.asynccontextmanager
async def shared(ranks: int, dtype: str = "float32") -> AsyncIterator[tuple[Any, Any, Any]]:
    """A clique, an array a rank (full of rank + 1), and the window of all of them."""
    async with clique(ranks) as comms:
        xs = [pynccl.empty(COUNT, dtype, device=comm) for comm in comms]
        for comm, x in zip(comms, xs, strict=True):
            np.asarray(x)[:] = comm.rank + 1
        windows = [comm.register_window(x) for comm, x in zip(comms, xs, strict=True)]
        for window in windows:
            await window
        yield comms, xs, windows
        await asyncio.gather(*(window.close() for window in windows))


async def test_a_window_is_made_and_ended(temper: str) -> None:
    with testing.journal() as journal:
        async with shared(2) as (comms, xs, windows):
            assert [window.nbytes for window in windows] == [4 * COUNT] * 2
            assert repr(windows[0]) == f"<Window of {4 * COUNT} bytes, open>"
            assert pynccl.diagnostics()["registrations"] == 2
            await pynccl.wait(*reduce_all(comms, xs))
            assert np.asarray(xs[1])[0] == 3
        assert pynccl.diagnostics()["registrations"] == 0
    calls = journal.named(*CALLS)
    assert [call.function for call in calls] == [CALLS[0]] * 2 + [CALLS[1]] * 2
    assert {call.result for call in calls} == {0}


async def test_put_and_signal(temper: str) -> None:
    async with shared(3) as (comms, xs, windows):
        for turn in range(3):
            for comm, x, window in zip(comms, xs, windows, strict=True):
                after = (comm.rank + 1) % 3
                np.asarray(x)[:8] = 10 * comm.rank + turn
                work = comm.put(x[:8], window, after, offset=64 * (turn + 1))
                assert work.nbytes == 32
            waits = [comm.wait_signal((comm.rank - 1) % 3) for comm in comms]
            await pynccl.wait(*waits)
            for comm, x in zip(comms, xs, strict=True):
                got = np.asarray(x)[16 * (turn + 1) :][:8]
                assert got.tolist() == [10 * ((comm.rank - 1) % 3) + turn] * 8


async def test_signals_are_counted_and_used_up(temper: str) -> None:
    async with shared(3) as (comms, _, _):
        works = [comm.signal(0) for comm in comms[1:] for _ in range(2)]
        await pynccl.wait(*works)
        await comms[0].wait_signal({1: 2, 2: 1})
        await comms[0].wait_signal(2)
        late = comms[0].wait_signal(1)
        await asyncio.sleep(0.01)
        assert not late.done()
        await comms[1].signal(0)
        await late


async def test_in_a_group_and_timed(temper: str) -> None:
    async with shared(2) as (comms, xs, windows):
        np.asarray(xs[0])[:4] = 9
        async with pynccl.group():
            comms[0].put(xs[0][:4], windows[0], 1, offset=16)
            comms[1].wait_signal(0)
        assert np.asarray(xs[1])[4:8].tolist() == [9] * 4
        work = comms[0].put(xs[0][:0], windows[0], 1, timed=True)  # a signal and no data
        await comms[1].wait_signal(0)
        await work
        assert work.duration >= 0
        assert "put" in repr(work)


async def test_a_part_of_an_allocation(temper: str) -> None:
    """Offsets count from the buffer that was registered, which lies at the same place."""
    async with clique(2) as comms:
        xs = [pynccl.empty(64, "int32", device=comm) for comm in comms]
        for comm, x in zip(comms, xs, strict=True):
            np.asarray(x)[:] = comm.rank
        windows = [comm.register_window(x[32:]) for comm, x in zip(comms, xs, strict=True)]
        for window in windows:
            await window
        assert (windows[0].offset, windows[0].nbytes) == (128, 256)
        again = comms[0].register_window(xs[0])
        assert (await again).offset == 0  # the same window, with no native call
        np.asarray(xs[1])[:2] = 5
        comms[1].put(xs[1][:2], windows[1], 0, offset=8)
        await comms[0].wait_signal(1)
        assert np.asarray(xs[0]).nonzero()[0].tolist() == [34, 35]
        await again.close()
        assert pynccl.diagnostics()["registrations"] == 2
        for window in windows:
            await window.close()


async def test_what_cannot_be_put(temper: str) -> None:
    async with shared(2) as (comms, xs, windows):
        other = pynccl.empty(4, device=comms[0])
        closed = comms[0].register_window(xs[0])
        await closed.close()
        with testing.journal() as journal:
            for arguments, kind, message in (
                ((other, windows[0], 1), InvalidBufferError, "x lies in no window"),
                ((xs[0], windows[0], 1, 4), InvalidBufferError, "4096 bytes, which do not fit"),
                ((xs[0], windows[0], 1, -1), ConfigError, "offset must be an integer from 0"),
                ((xs[0], windows[0], 2), ConfigError, "peer must be a rank from 0 to 1"),
                ((xs[0], windows[1], 1), UsageError, "window of another communicator"),
                ((xs[0], xs[0], 1), ConfigError, "window must be what register_window"),
            ):
                with pytest.raises(kind, match=message):
                    comms[0].put(*arguments)
            with pytest.raises(ConfigError, match="count must be an integer from 1"):
                comms[0].wait_signal(1, 0)
            with pytest.raises(ConfigError, match="signal must be an integer"):
                comms[0].signal(1, signal=-1)
            with pytest.raises(ConfigError, match="no peer to wait for"):
                comms[0].wait_signal({})
            assert journal.nccl() == []
        await all_reduced(comms)


async def test_a_window_that_is_not_ready(temper: str) -> None:
    async with clique(2) as comms:
        xs = [pynccl.empty(4, device=comm) for comm in comms]
        first = comms[0].register_window(xs[0])
        with pytest.raises(UsageError, match="has not been awaited yet"):
            comms[0].put(xs[0], first, 1)
        second = await comms[1].register_window(xs[1])
        await first
        await asyncio.gather(first.close(), second.close())
        with pytest.raises(UsageError, match="window is closed"):
            comms[0].put(xs[0], first, 1)


async def test_where_there_are_no_windows(temper: str) -> None:
    """NCCL answers success and gives none; memory of others it refuses later, so we do now."""
    async with clique(2) as comms:
        xs = [pynccl.empty(4, device=comm) for comm in comms]
        with testing.settings(windows=0):
            windows = [comm.register_window(x) for comm, x in zip(comms, xs, strict=True)]
            for window in windows:
                with pytest.raises(NotSupportedError, match="no symmetric memory"):
                    await window

            async def enter() -> None:
                async with comms[0].register_window(xs[0]):
                    pass

            with pytest.raises(NotSupportedError, match="no symmetric memory"):
                await asyncio.wait_for(enter(), 5)
        with pytest.raises(InvalidBufferError, match=r"memory from pynccl.empty"):
            comms[0].register_window(np.ones(4))
        assert pynccl.diagnostics()["registrations"] == 0
        await all_reduced(comms)


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_what_is_left_goes_with_the_communicator(temper: str, end: str) -> None:
    comms = await pynccl.create_all(["cpu:0", "cpu:1"])
    xs: Any = [pynccl.empty(4, device=comm) for comm in comms]
    windows = [comm.register_window(x) for comm, x in zip(comms, xs, strict=True)]
    for window in windows:
        await window
    if end == "abort":
        work = comms[0].wait_signal(1)
        await asyncio.sleep(0.01)
        await abort(comms)
        assert isinstance(work.exception(), pynccl.AbortedError)
        del work
    else:
        await asyncio.gather(*(comm.close() for comm in comms))
    xs.clear()
    await gone("registrations")
    await gone("allocations")
    await windows[0].close()


async def test_a_signal_that_never_comes(temper: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        comms = await pynccl.create_all(["cpu:0", "cpu:1"])
        stack.push_async_callback(abort, comms)
        xs = [pynccl.empty(4, device=comm) for comm in comms]
        windows = [comm.register_window(x) for comm, x in zip(comms, xs, strict=True)]
        for window in windows:
            await window
        with pytest.raises(pynccl.DeadlineError, match=r"wait_signal .*did not end within 0.0"):
            await comms[0].wait_signal(1, timeout=0.05)
