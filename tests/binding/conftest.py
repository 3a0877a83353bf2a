"""Fixtures: those of all tests of the binding."""

from __future__ import annotations

import gc

from support.binding_fixtures import loop as loop
from support.binding_fixtures import no_garbage as no_garbage
from support.binding_fixtures import nothing_left as nothing_left
from support.binding_fixtures import pytest_pyfunc_call as pytest_pyfunc_call
from support.binding_fixtures import pytest_runtest_makereport as pytest_runtest_makereport
from support.binding_fixtures import temper as temper


def pytest_collection_finish() -> None:
    # What the imports have made stays: the collections between the tests need not look at it.
    gc.collect()
    gc.freeze()
