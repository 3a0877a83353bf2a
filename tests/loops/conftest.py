"""Fixtures: those of the binding's tests, on more kinds of loops; what is run with --long."""

from __future__ import annotations

import pytest
from support.binding_fixtures import nothing_left as nothing_left
from support.binding_fixtures import pytest_runtest_makereport as pytest_runtest_makereport
from support.binding_fixtures import run_coroutine
from support.binding_fixtures import temper as temper
from support.loops import KINDS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
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
    return run_coroutine(pyfuncitem, "plain")


@pytest.fixture(params=KINDS)
def loop(request: pytest.FixtureRequest) -> str:
    """Run the test on each kind of event loop."""
    kind: str = request.param
    return kind
