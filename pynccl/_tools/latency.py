"""The figures of `bench --latency`: one function each, a heartbeat beside those on a loop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

import pynccl
from pynccl import _engines, testing
from pynccl._native import __path__ as native_path
from pynccl._tools import latency_nccl4py
from pynccl._tools.figures import Figure, medians
from pynccl._tools.latency_peers import between_processes

LOOPS = 20_000
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(rounds: int, only: str | None) -> list[Figure]:
    """Every figure whose name contains `only`."""
    makers: dict[str, Callable[[int], Figure]] = {
        "issue of all_reduce, NumPy": issue_numpy,
        "issue of all_reduce, torch": issue_torch,
        "issue of all_reduce, JAX": issue_jax,
        "issue and await of a finished operation": await_finished,
        "completions, 1000 in flight": completions,
        "round trip, done 10 us after issue": round_trip,
        "awaited 8-byte all_reduce, 2 processes": partial(between_processes, 2),
        "awaited 8-byte all_reduce, 4 processes": partial(between_processes, 4),
    }
    found = []
    for name, make in makers.items():
        if only is None or only in name:
            # A full collection over torch's objects takes 90 ms: the heartbeat would see it.
            gc.collect()
            gc.freeze()
            found.append(make(rounds))
    return found


# ---- helpers -------------------------------------------------------------------------------


def on_engine(
    kind: str, body: Callable[[pynccl.Communicator], Coroutine[Any, Any, Figure]]
) -> Figure:
    """Run `body` on a fresh loop with a one-rank communicator of an engine."""

    async def main() -> Figure:
        before = os.environ.get("PYNCCL_ENGINE")
        os.environ["PYNCCL_ENGINE"] = kind
        try:
            unique_id = await pynccl.unique_id(0)
            comm = await pynccl.Communicator.create(1, 0, unique_id, device=0)
        finally:
            if before is None:
                del os.environ["PYNCCL_ENGINE"]
            else:
                os.environ["PYNCCL_ENGINE"] = before
        async with comm:
            return await body(comm)

    return asyncio.run(main())


class Heartbeat:
    """A task that wants to run every millisecond, and the longest gap that it saw, in ms."""

    async def __aenter__(self) -> Heartbeat:
        self.worst = 0.0
        self._paused = False
        self._task = asyncio.ensure_future(self._beat())
        await asyncio.sleep(0)
        return self

    async def _beat(self) -> None:
        self._last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            if not self._paused:
                self.worst = max(self.worst, (now - self._last) * 1e3)
            self._last = now

    def pause(self) -> None:
        """Do not look for a while."""
        self._paused = True

    def go_on(self) -> None:
        """Look again, from now on."""
        self._paused = False
        self._last = time.perf_counter()

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()


def per_call_us(call: Callable[[], object], loops: int = LOOPS) -> float:
    """Microseconds of one call, the empty loop taken off."""
    start = time.perf_counter_ns()
    for _ in range(loops):
        call()
    middle = time.perf_counter_ns()
    for _ in range(loops):
        pass
    return (2 * middle - start - time.perf_counter_ns()) / loops / 1e3


def counts(*functions: str) -> dict[str, int]:
    """How often the no-op engine has been called."""
    engine = _engines.engine("noop")
    return {function: int(engine.parameter(function)) for function in functions}


def require_counts(before: dict[str, int], calls: int, awaited: bool) -> None:
    """Raise unless every operation made one collective call, one event record, one query."""
    after = counts(*before)
    grown = {name: after[name] - before[name] for name in before}
    wanted = {"ncclAllReduce": calls, "cuEventRecord": calls}
    if {name: grown[name] for name in wanted} != wanted:
        raise AssertionError(f"{calls} operations made {grown} native calls")
    if awaited and grown["cuEventQuery"] < calls:
        raise AssertionError(f"{calls} awaits made {grown['cuEventQuery']} queries")


COUNTED = ("ncclAllReduce", "cuEventRecord", "cuEventQuery")


# ---- issue -------------------------------------------------------------------------------


def issue_numpy(rounds: int) -> Figure:
    """One issue on the no-op engine against a bare ctypes call, and against nccl4py."""

    async def body(comm: pynccl.Communicator) -> Figure:
        x = np.ones(4, np.float32)
        library = ctypes.CDLL(os.fspath(f"{native_path[0]}/libpynccl_noop.so"))
        bare = library.ncclAllReduce
        word = ctypes.c_void_p
        bare.argtypes = [word, word, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, word, word]
        at = x.ctypes.data
        before = counts(*COUNTED)
        found = medians(
            {
                "ours": lambda: per_call_us(lambda: comm.all_reduce(x)),
                "ctypes": lambda: per_call_us(lambda: bare(at, at, 4, 7, 0, 8, 16)),
            },
            rounds,
        )
        before["ncclAllReduce"] += rounds * LOOPS  # the bare calls are counted too
        require_counts(before, rounds * LOOPS, awaited=False)
        return Figure(
            "issue of all_reduce, NumPy",
            "us",
            found["ours"],
            {"ctypes": found["ctypes"]},
            {"ctypes": 1 / 0.8, "nccl4py": 40},
        )

    figure = on_engine("noop", body)
    if why := latency_nccl4py.absent():
        figure.absent["nccl4py"] = why
    else:
        figure.rivals["nccl4py"] = statistics.median(latency_nccl4py.issue_us(rounds))
    return figure


def issue_torch(rounds: int) -> Figure:
    """One issue of a torch CPU tensor against its own __dlpack__()."""
    name = "issue of all_reduce, torch"
    try:
        import torch
    except ImportError:
        return Figure(name, "us", 0.0, {}, {}, absent={"torch": "it is not installed"})

    async def body(comm: pynccl.Communicator) -> Figure:
        x = torch.ones(4)
        found = medians(
            {
                "ours": lambda: per_call_us(lambda: comm.all_reduce(x)),
                "__dlpack__": lambda: per_call_us(x.__dlpack__),
            },
            rounds,
        )
        return Figure(
            name,
            "us",
            found["ours"],
            {"x.__dlpack__()": found["__dlpack__"]},
            {"x.__dlpack__()": 1 / 0.4},
        )

    return on_engine("noop", body)


def issue_jax(rounds: int) -> Figure:
    """One issue of a JAX CPU array against its own __dlpack__(); making its result is apart."""
    name = "issue of all_reduce, JAX"
    try:
        import jax
    except ImportError:
        return Figure(name, "us", 0.0, {}, {}, absent={"jax": "it is not installed"})

    async def body(comm: pynccl.Communicator) -> Figure:
        x = jax.numpy.ones(4)
        loops = LOOPS // 10

        def conversion() -> float:
            works = iter([comm.all_reduce(x) for _ in range(loops)])
            return per_call_us(lambda: next(works).result(), loops)

        found = medians(
            {
                "ours": lambda: per_call_us(lambda: comm.all_reduce(x)),
                "__dlpack__": lambda: per_call_us(x.__dlpack__),
                "conversion": conversion,
            },
            rounds,
        )
        return Figure(
            name,
            "us",
            found["ours"],
            {"x.__dlpack__()": found["__dlpack__"]},
            {"x.__dlpack__()": 1 / 1.7},
            notes={"result as a JAX array, us": found["conversion"]},
        )

    return on_engine("noop", body)


# ---- await -------------------------------------------------------------------------------


async def timed(body: Callable[[], Awaitable[object]], loops: int) -> float:
    """Microseconds of one turn."""
    start = time.perf_counter_ns()
    for _ in range(loops):
        await body()
    return (time.perf_counter_ns() - start) / loops / 1e3


async def beyond_10_us(body: Callable[[], Awaitable[object]], loops: int) -> list[float]:
    """Microseconds of each turn, less ten."""
    found = []
    for _ in range(loops):
        start = time.perf_counter_ns()
        await body()
        found.append((time.perf_counter_ns() - start) / 1e3 - 10)
    return found


def await_finished(rounds: int) -> Figure:
    """Issue and await on the no-op engine against a thread of an executor."""

    async def body(comm: pynccl.Communicator) -> Figure:
        x = np.ones(4, np.float32)
        loop = asyncio.get_running_loop()
        ours: list[float] = []
        executor: list[float] = []
        before = counts(*COUNTED)
        with ThreadPoolExecutor(1) as pool:
            async with Heartbeat() as heartbeat:
                for _ in range(rounds):
                    ours.append(await timed(lambda: comm.all_reduce(x), LOOPS))
                    executor.append(
                        await timed(lambda: loop.run_in_executor(pool, int), LOOPS // 20)
                    )
        require_counts(before, rounds * LOOPS, awaited=True)
        rival = "await loop.run_in_executor(wait)"
        return Figure(
            "issue and await of a finished operation",
            "us",
            statistics.median(ours),
            {rival: statistics.median(executor)},
            {rival: 40},
            notes={"worst heartbeat gap, ms": heartbeat.worst},
        )

    return on_engine("noop", body)


def completions(rounds: int) -> Figure:
    """A thousand suspended awaits that all end at once, against call_soon_threadsafe each."""
    devices, each = 8, 125
    rival_name = "call_soon_threadsafe each"

    async def resumed(start: Callable[[list[Held]], list[Any]], held: list[Held]) -> float:
        """Thousands a second, from the release to the last task that is back from its await."""
        for hold in held:
            hold.close()
        awaitables = start(held)
        left = [len(awaitables)]
        end = asyncio.get_running_loop().create_future()

        async def one(awaitable: Any) -> None:
            await awaitable
            left[0] -= 1
            if not left[0]:
                end.set_result(None)

        tasks = [asyncio.ensure_future(one(awaitable)) for awaitable in awaitables]
        await asyncio.sleep(0.01)  # all of them have suspended
        began = time.perf_counter()
        for hold in held:
            hold.open()
        await end
        rate = len(awaitables) / (time.perf_counter() - began) / 1e3
        await asyncio.gather(*tasks)
        return rate

    async def main() -> Figure:
        x = np.ones(2, np.float32)
        comms = []
        for i in range(devices):
            unique_id = await pynccl.unique_id("cpu")
            comms.append(await pynccl.Communicator.create(1, 0, unique_id, device=f"cpu:{i}"))
        held = [Held(f"cpu:{i}") for i in range(devices)]
        loop = asyncio.get_running_loop()

        def works(held: list[Held]) -> list[Any]:
            pairs = list(zip(comms, held, strict=True))
            return [c.all_reduce(x, stream=h.stream) for _ in range(each) for c, h in pairs]

        def callbacks(held: list[Held]) -> list[Any]:
            """Host functions that take the GIL: what a binding without an engine room does."""
            futures = []
            for hold in held:
                for _ in range(each):
                    future = loop.create_future()
                    hold.call(partial(loop.call_soon_threadsafe, future.set_result, None))
                    futures.append(future)
            return futures

        rates: list[float] = []
        others: list[float] = []
        async with Heartbeat() as heartbeat:
            for _ in range(rounds):
                rates.append(await resumed(works, held))
                heartbeat.pause()  # the rival's gaps are not ours
                others.append(await resumed(callbacks, held))
                heartbeat.go_on()
        for comm in comms:
            await comm.close()
        return Figure(
            "completions, 1000 in flight",
            "k/s",
            statistics.median(rates),
            {rival_name: statistics.median(others)},
            {rival_name: 10},
            is_rate=True,
            notes={"worst heartbeat gap, ms": heartbeat.worst},
        )

    return asyncio.run(main())


class Held:
    """A stream of the host engine that a memory wait holds back."""

    def __init__(self, device: str) -> None:
        self.stream = pynccl.Stream(device)
        self._value = 0
        self._callbacks: list[object] = []
        library = ctypes.CDLL(os.fspath(f"{native_path[0]}/libpynccl_host.so"))
        self._library = library
        self._wait = library.cuStreamWaitValue32_v2
        self._wait.argtypes = [
            ctypes.c_void_p,
            ctypes.c_ulonglong,
            ctypes.c_uint,
            ctypes.c_uint,
        ]
        self._context = ctypes.c_void_p()
        ordinal = self.stream.device_ordinal
        assert library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), ordinal) == 0
        library.cuCtxSetCurrent(self._context)
        memory = ctypes.c_void_p()
        assert library.cuMemHostAlloc(ctypes.byref(memory), ctypes.c_size_t(4), 3) == 0
        self._word = ctypes.c_uint.from_address(memory.value or 0)

    def close(self) -> None:
        """Hold what comes next."""
        self._value += 1
        self._library.cuCtxSetCurrent(self._context)
        assert self._wait(self.stream.handle, ctypes.addressof(self._word), self._value, 0) == 0

    def open(self) -> None:
        """Let it go."""
        self._word.value = self._value

    def call(self, function: Callable[[], object]) -> None:
        """Put a Python function on it (`cuLaunchHostFunc`)."""
        callback = HOST_FUNCTION(lambda _: function())
        self._callbacks.append(callback)
        self._library.cuCtxSetCurrent(self._context)
        stream = ctypes.c_void_p(self.stream.handle)
        assert self._library.cuLaunchHostFunc(stream, callback, None) == 0


def round_trip(rounds: int) -> Figure:
    """An operation that ends 10 us after its issue, against an executor that waits 10 us."""

    async def body(comm: pynccl.Communicator) -> Figure:
        x = np.ones(4, np.float32)
        comm.spin_us = 20
        loop = asyncio.get_running_loop()

        def wait() -> None:
            end = time.perf_counter_ns() + 10_000
            while time.perf_counter_ns() < end:
                pass

        ours: list[float] = []
        executor: list[float] = []
        with testing.faults("op:delay=10us"), ThreadPoolExecutor(1) as pool:
            async with Heartbeat() as heartbeat:
                # In turns of a hundred: a thread on its way to sleep is in nobody's way then.
                for _ in range(rounds):
                    ours += await beyond_10_us(lambda: comm.all_reduce(x), 100)
                    executor += await beyond_10_us(
                        lambda: loop.run_in_executor(pool, wait), 100
                    )
        rival = "await loop.run_in_executor(wait)"
        return Figure(
            "round trip, done 10 us after issue",
            "us beyond the 10",
            statistics.median(ours),
            {rival: statistics.median(executor)},
            {rival: 20},
            notes={"worst heartbeat gap, ms": heartbeat.worst},
        )

    return on_engine("host", body)
