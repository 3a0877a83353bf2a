"""Other code's stream captures beside pynccl, which makes no part of one yet."""

from __future__ import annotations

import asyncio
import ctypes

import numpy as np
import pytest
from cliques import arrays, clique
from foreign_stream import GLOBAL, THREAD_LOCAL, Capture, ForeignStream

import pynccl
from pynccl import UsageError, testing

INVALIDATED = 901


async def test_a_global_capture_survives_what_pynccl_does(temper: str) -> None:
    """The waiter polls, lanes launch, the loop records: all in relaxed mode."""
    with ForeignStream() as stream:
        capture = Capture(stream)
        async with clique(2) as comms:
            xs = arrays(comms)
            with testing.journal() as journal, capture.going_on(GLOBAL):
                first = comms[0].all_reduce(xs[0])
                await asyncio.sleep(0.02)  # the waiter looks, in vain
                await pynccl.wait(first, comms[1].all_reduce(xs[1]))
                await pynccl.Stream("cpu:1")
            assert journal.named("cuEventQuery")
            assert xs[0].tolist() == [3] * 4
        assert capture.code == 0


async def test_a_query_that_is_not_relaxed_breaks_it(temper: str) -> None:
    """What the test above would see if the waiter forgot its mode."""
    with ForeignStream() as stream:
        capture, event = Capture(stream), ctypes.c_void_p()
        with stream.current():
            stream.must("cuEventCreate", ctypes.byref(event), 2)

        def ask() -> None:
            with stream.current():
                stream.driver.cuEventQuery(event)

        with capture.going_on(GLOBAL):
            await asyncio.to_thread(ask)
        with stream.current():
            stream.must("cuEventDestroy_v2", event)
        assert capture.code == INVALIDATED


async def test_a_stream_that_is_captured_is_refused(temper: str) -> None:
    with ForeignStream() as stream:
        capture = Capture(stream)
        async with clique(1, warm=True) as comms:
            x = np.ones(4, np.float32)
            done = comms[0].all_reduce(x)
            with capture.going_on(THREAD_LOCAL):
                with pytest.raises(UsageError, match="captured into a graph"):
                    comms[0].all_reduce(x, stream=stream)
                with pytest.raises(UsageError, match="captured into a graph"):
                    done.order(stream)
            assert capture.code == 0
            await done
            await comms[0].all_reduce(x, stream=stream)
