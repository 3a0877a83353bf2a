"""Fixtures of the binding's tests: both tempers, several loops, and nothing left behind.

A test that is a coroutine function runs on the loop that its `loop` fixture names, or in
asyncio's debug mode.
"""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Generator, Iterator
from typing import Any

import loops
import pytest

import pynccl
from pynccl import testing

COUNTS = ("operations", "communicators", "streams", "lanes", "aborts_running")


def pytest_collection_finish() -> None:
    # What the imports have made stays: the collections between the tests need not look at it.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    function = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return None
    names = inspect.signature(function).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    kind = str(pyfuncitem.funcargs.get("loop", "debug"))
    loops.run_on(kind, function(**arguments))
    return True


@pytest.fixture(params=["quick", "gpulike"])
def temper(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test in each temper of the host engine."""
    with testing.temper(request.param):
        yield request.param


@pytest.fixture(params=loops.KINDS)
def loop(request: pytest.FixtureRequest) -> str:
    """Run the test on each kind of event loop."""
    kind: str = request.param
    return kind


def counts() -> dict[str, int]:
    """What must be as it was when a test has ended: the binding's objects, and the engine's."""
    mine = pynccl.diagnostics()
    engine = testing.live()
    return {
        **{name: mine[name] for name in COUNTS},
        **{f"engine {name}": engine[name] for name in ("communicators", "streams", "segments")},
    }


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
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
