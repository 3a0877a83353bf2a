"""Fixtures of tests of the binding: tempers, loops, coroutine tests, and nothing left behind.

A conftest imports the names that it wants. What tests/binding has to offer by name (`cliques`,
`foreign_stream`) can be imported then, too.
"""

from __future__ import annotations

import gc
import inspect
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import pynccl
from pynccl import testing
from support import loops

sys.path.append(str(Path(__file__).parents[1] / "binding"))

COUNTS = ("operations", "communicators", "streams", "lanes", "aborts_running")
ENGINE_COUNTS = ("communicators", "streams", "segments")


def run_coroutine(item: pytest.Function, loop: str) -> bool | None:
    """Run a test that is a coroutine function: on the loop of its fixture, or on `loop`."""
    function = item.obj
    if not inspect.iscoroutinefunction(function):
        return None
    names = inspect.signature(function).parameters
    arguments = {name: item.funcargs[name] for name in names}
    loops.run_on(str(item.funcargs.get("loop", loop)), function(**arguments))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine functions, in asyncio's debug mode if nothing else is said."""
    return run_coroutine(pyfuncitem, "debug")


@pytest.fixture(params=["quick", "gpulike"])
def temper(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test in each temper of the host engine."""
    with testing.temper(request.param):
        yield request.param


@pytest.fixture(params=[kind for kind in loops.KINDS if kind != "plain"])
def loop(request: pytest.FixtureRequest) -> str:
    """Run the test on each kind of event loop; the plain one is there in debug mode."""
    kind: str = request.param
    return kind


def counts() -> dict[str, int]:
    """What must be as it was when a test has ended: the binding's objects, and the engine's."""
    mine = pynccl.diagnostics()
    engine = testing.live()
    return {
        **{name: mine[name] for name in COUNTS},
        **{f"engine {name}": engine[name] for name in ENGINE_COUNTS},
    }


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note whether the test has failed, for `nothing_left`."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a communicator, an operation, a stream or a thread behind."""
    before = counts()
    yield
    if request.node.stash.get(FAILED, False):
        return  # its traceback holds what it had
    # Not "equal": the traceback of an earlier failure may have held what is gone now.
    for attempt in range(1000):
        more = {name: n - before[name] for name, n in counts().items() if n > before[name]}
        if not more:
            break
        if attempt % 100 == 2:
            gc.collect()  # of a test that looked at an exception, which holds its frame
        else:
            time.sleep(0.002 if attempt < 20 else 0.008)
    assert more == {}


@pytest.fixture
def no_garbage() -> None:
    """Let go of what tracebacks of earlier tests have kept, for tests that count memory."""
    gc.collect()
    end = time.monotonic() + 5
    while pynccl.diagnostics()["allocations"] and time.monotonic() < end:
        time.sleep(0.002)
