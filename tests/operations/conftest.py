"""Fixtures: those of the binding's tests, and communicators that serve many operations."""

from __future__ import annotations

import pytest
from support.binding_fixtures import nothing_left as nothing_left
from support.binding_fixtures import pytest_pyfunc_call as pytest_pyfunc_call
from support.binding_fixtures import pytest_runtest_makereport as pytest_runtest_makereport
from support.binding_fixtures import temper as temper


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-table",
        action="store_true",
        help="write the table of dtypes in the README, instead of comparing it",
    )


@pytest.fixture
def writes_table(request: pytest.FixtureRequest) -> bool:
    # The default serves a run that met this file too late to add the option.
    return bool(request.config.getoption("--write-table", default=False))
