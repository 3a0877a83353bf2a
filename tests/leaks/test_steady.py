"""What goes on for ever holds no more at its end than at its beginning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEADY = Path(__file__).with_name("steady.py")
SLOPE_BYTES = 40_000
"""A round's growth of memory that is no leak: the allocator's own, and the samples."""
SLOPE_BLOCKS = 60
"""The same in Python's blocks: the samples themselves, which are kept, are half of it."""


def run(program: str, total: int, temper: str) -> list[dict[str, int]]:
    """The samples of a program of steady.py."""
    done = subprocess.run(
        [sys.executable, str(STEADY), program, str(total)],
        env={
            **os.environ,
            "PYNCCL_HOST_TEMPER": temper,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    samples: list[dict[str, int]] = json.loads(done.stdout)
    return samples


def slope(values: list[int]) -> float:
    """The least squares' growth a sample."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    over = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    return over / sum((i - middle) ** 2 for i in range(len(values)))


def leaks(samples: list[dict[str, int]]) -> list[str]:
    """What grows from the third sample on; the first two still fill pools.

    Memory settles later: the first hundreds of communicators fill Python's own pools. A count
    may go up and down; of what leaks every later one is above every earlier one.
    """
    settled = samples[2:]
    found = []
    for name in settled[0]:
        values = [sample[name] for sample in settled]
        if name in ("bytes", "blocks"):
            limit = SLOPE_BYTES if name == "bytes" else SLOPE_BLOCKS
            if slope(values[len(values) // 2 :]) > limit:
                found.append(f"{name}: {values}")
        elif name.endswith(" events"):
            # Idle events are kept for later, as many as were ever in use at once.
            if values[-1] > 300:
                found.append(f"{name}: {values}")
        elif min(values[len(values) // 2 :]) > max(values[: len(values) // 2]):
            found.append(f"{name}: {values}")
    return found


def lasting(program: str, total: int, temper: str) -> list[str]:
    """What grows each time: on a busy machine pools may fill late; a leak is always there."""
    found: list[str] = []
    for _ in range(3):
        samples = run(program, total, temper)
        assert samples[-1]["binding operations"] == 0
        again = leaks(samples)
        names = {one.partition(":")[0] for one in again}
        found = [one for one in found or again if one.partition(":")[0] in names]
        if not found:
            break
    return found


@pytest.mark.parametrize(
    ("program", "total"),
    [
        ("all_reduces", 100_000),
        ("through_lanes", 10_000),
        ("cancels", 3_000),
        ("lives", 1500),
        ("memory", 500),
    ],
)
def test_nothing_grows(program: str, total: int) -> None:
    assert lasting(program, total, "quick") == []


@pytest.mark.parametrize(
    ("program", "total"), [("through_lanes", 2_000), ("lives", 200), ("memory", 200)]
)
def test_nothing_grows_where_calls_block(program: str, total: int) -> None:
    assert lasting(program, total, "gpulike") == []


def test_a_planted_leak_is_caught() -> None:
    found = lasting("planted", 10_000, "quick")
    assert [name.partition(":")[0] for name in found] == ["bytes", "files", "blocks"]
