"""Fixtures of the tests of event loops: kinds of loops, tempers, and nothing left behind."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import running

import pynccl
from pynccl import testing

COUNTS = ("operations", "communicators", "streams", "lanes", "aborts_running")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="run the tests of tests/loops at their full length: millions of operations",
    )


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether the full length is asked for."""
    # The default serves a run that met this file too late to add the option.
    return bool(request.config.getoption("--long", default=False))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long", default=False):
        for item in items:
            if "long" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.timeout(880))
        return
    kept = [item for item in items if not is_for_full_length(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


SLOW = {
    "test_deadlines_are_kept": "uvloop",
    "test_a_deadline_beside_a_held_interpreter": "gpulike",
}


def is_for_full_length(item: pytest.Item) -> bool:
    """Whether one of this folder's tests runs with --long only.

    Those in asyncio's debug mode, which tests/binding always uses, and the second or third
    variant of some that wait for seconds.
    """
    callspec = getattr(item, "callspec", None)
    if callspec is None or not item.nodeid.startswith("tests/loops/"):
        return False
    values = list(callspec.params.values())
    slow = SLOW.get(getattr(item, "originalname", ""))
    return "debug" in values or slow in values


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    function = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return None
    names = inspect.signature(function).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    running.run_on(pyfuncitem.funcargs.get("loop", "plain"), function(**arguments))
    return True


@pytest.fixture(params=["quick", "gpulike"])
def temper(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test in each temper of the host engine."""
    with testing.temper(request.param):
        yield request.param


@pytest.fixture(params=running.KINDS)
def loop(request: pytest.FixtureRequest) -> str:
    """Run the test on each kind of event loop."""
    kind: str = request.param
    return kind


def counts() -> dict[str, int]:
    """What must be as it was when a test has ended."""
    mine, engine = pynccl.diagnostics(), testing.live()
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
    """Fail a test that leaves a communicator, an operation, a stream or a lane behind."""
    before = counts()
    yield
    if request.node.stash.get(FAILED, False):
        return  # its traceback holds what it had
    for attempt in range(1000):
        more = {name: n - before[name] for name, n in counts().items() if n > before[name]}
        if not more:
            break
        time.sleep(0.005)
        if attempt % 100 == 10:
            gc.collect()
    assert more == {}
