"""How much of the table of collectives is run, and how long that may take."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-combinations",
        action="store_true",
        help="run every combination of tests/ranks/plan.py instead of a fixed sample",
    )


def is_complete(config: pytest.Config) -> bool:
    """Say whether the whole table is asked for."""
    # The default serves a run that met this file too late to add the option.
    return bool(config.getoption("--all-combinations", default=False))


@pytest.fixture
def complete(request: pytest.FixtureRequest) -> bool:
    return is_complete(request.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = 1800 if is_complete(config) else 120
    for item in items:
        if "complete" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(seconds + 20))
