"""Tests that measure time are marked, so that no others run beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import timing
import tree

HEART = "from heartbeat import keeps_free\n"
MARKED = "pytestmark = pytest.mark.timing\n"
TIGHT = "def test_a():\n    assert time.perf_counter() - begun < 0.1\n"


def test_tests_that_measure_time_are_marked() -> None:
    files = sorted((tree.ROOT / "tests").rglob("test_*.py"))
    assert [line for path in files for line in timing.unmarked(path)] == []
    assert any("pytest.mark.timing" in path.read_text("utf-8") for path in files)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (HEART, 1),
        (HEART + MARKED, 0),
        (HEART + "pytestmark = [pytest.mark.timeout(1), pytest.mark.timing]\n", 0),
        (TIGHT, 1),
        ("@pytest.mark.timing\n" + TIGHT, 0),
        ("@pytest.mark.skip\n" + TIGHT, 1),
        (TIGHT.replace("0.1", "5"), 0),
        (TIGHT.replace("<", ">="), 0),
        ("async " + TIGHT.replace("time.perf_counter()", "0.05 <= error.elapsed"), 1),
    ],
)
def test_one_that_is_not_is_caught(tmp_path: Path, text: str, found: int) -> None:
    assert len(list(timing.unmarked(tree.write(tmp_path, "test_a.py", text)))) == found
