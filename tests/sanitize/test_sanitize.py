"""The host engine's own tests beneath gcc's sanitizers: no report, and every test passes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import instrumented
import pytest
from instrumented import HOST, KINDS, PLANTED

pytestmark = pytest.mark.timeout(300)

# What threads and processes do to each other; the rest is the same in one thread, or waits.
PARTS = {
    "threads": ["test_nccl_threads.py", "test_misuse.py", "test_driver_streams.py"],
    "lives": ["test_nccl_life.py", "test_nccl_groups.py"],
    "collectives": ["test_nccl_collectives.py"],
    "windows": ["test_nccl_windows.py"],
}
TOO_LONG = "not large and not every_operation"
LEFT_OUT = {
    "address": TOO_LONG,
    "thread": f"{TOO_LONG} and not process",  # it sees races between threads only
}

Build = Callable[[str, list[Path]], Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds what a test asks for, once."""
    libraries: dict[tuple[str, Path], Path] = {}

    def build(kind: str, sources: list[Path]) -> Path:
        key = (kind, sources[0])
        if key not in libraries:
            folder = tmp_path_factory.mktemp(kind)
            libraries[key] = instrumented.build(kind, sources, folder)
        return libraries[key]

    return build


def run(kind: str, library: Path, *arguments: str) -> instrumented.Outcome:
    try:
        return instrumented.run(kind, library, arguments, timeout=240)
    except instrumented.Unavailable as why:
        pytest.skip(f"no sanitizer: {why}")


@pytest.mark.parametrize(("part", "kind"), list(product(PARTS, KINDS)))
def test_nothing_is_reported(built: Build, part: str, kind: str) -> None:
    files = [f"tests/host/{name}" for name in PARTS[part]]
    chosen = ["-m", "not timing", "-k", LEFT_OUT[kind], "-p", "no:cacheprovider", "-q"]
    ended = run(kind, built(kind, HOST), "-m", "pytest", *chosen, *files)
    assert ended.reports == ""
    assert ended.code == 0, ended.output
    assert " passed" in ended.output


@pytest.mark.parametrize(
    ("kind", "fault", "words"),
    [
        ("address", "overflow", "heap-buffer-overflow"),
        ("address", "undefined", "signed integer overflow"),
        ("thread", "race", "data race"),
    ],
)
def test_a_planted_fault_is_reported(built: Build, kind: str, fault: str, words: str) -> None:
    library = built(kind, PLANTED)
    program = f"import ctypes; ctypes.CDLL({str(library)!r}).{fault}(7)"
    ended = run(kind, library, "-c", program)
    assert words in ended.reports + ended.output
    assert ended.reports or ended.code != 0, "the run would have passed"
