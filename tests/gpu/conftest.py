"""What the tests here share: whether there is a GPU, and why not."""

from __future__ import annotations

import pytest
from assumptions.runner import Runner
from assumptions.verdict import HOLDS

NO_DEVICE = "CUDA_ERROR_NO_DEVICE"


def why_no_gpu() -> str:
    """The reason to skip, empty where there is a GPU; a GPU with no NCCL is no reason."""
    from pynccl import _engines

    if not _engines.has_driver():
        return "no GPU: this machine shows no NVIDIA driver"
    facts = Runner("nccl").facts()
    return f"no GPU: {facts.reason}" if NO_DEVICE in facts.reason else ""


@pytest.fixture(scope="session")
def gpu_runner() -> Runner:
    """Give a runner for the real libraries, or skip."""
    if reason := why_no_gpu():
        pytest.skip(reason)
    runner = Runner("nccl")
    facts = runner.facts()
    assert facts.verdict == HOLDS, facts.reason
    return runner
