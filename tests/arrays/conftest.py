"""Fixtures: those of the binding's tests, and the host engine in the place of NCCL and CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.binding_fixtures import loop as loop
from support.binding_fixtures import nothing_left as nothing_left
from support.binding_fixtures import pytest_pyfunc_call as pytest_pyfunc_call
from support.binding_fixtures import pytest_runtest_makereport as pytest_runtest_makereport
from support.binding_fixtures import temper as temper

from pynccl import _engines, _native
from pynccl._native.engine import Engine

sys.path.append(str(Path(__file__).parent.parent / "loops"))  # for its guarded pages
HOST = str(Path(_native.__path__[0]) / "libpynccl_host.so")


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether the full length is asked for (the option of tests/loops)."""
    return bool(request.config.getoption("--long", default=False))


@pytest.fixture(scope="session")
def gpu_engine() -> Engine:
    """The host engine's library as "cuda": to the binding its memory is a GPU's."""
    return Engine("nccl", HOST, HOST, is_cuda=True)


@pytest.fixture
def on_gpu(gpu_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make "cuda:0" and its like mean that engine."""
    _engines.engine("host")
    monkeypatch.setitem(_engines._opened, "nccl", gpu_engine)
    monkeypatch.setitem(_engines._how, "nccl", "a test")
