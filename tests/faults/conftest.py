"""Fixtures: those of the binding's tests."""

from support.binding_fixtures import loop as loop
from support.binding_fixtures import nothing_left as nothing_left
from support.binding_fixtures import pytest_pyfunc_call as pytest_pyfunc_call
from support.binding_fixtures import pytest_runtest_makereport as pytest_runtest_makereport
from support.binding_fixtures import temper as temper
