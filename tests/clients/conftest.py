"""Fixtures of the tests with other people's programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "abi"))
import toolchain


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What nccl.h wants of CUDA's headers, where there is no toolkit."""
    return toolchain.write_stand_ins(tmp_path_factory.mktemp("headers"))
