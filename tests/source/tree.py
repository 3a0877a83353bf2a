"""The files of this project, in the real tree or in a planted copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("src", "pynccl", "tests", "examples")
WRITTEN = (".py", ".pyi", ".pyx", ".pxd", ".c", ".h")
NOT_OURS = {"__pycache__", "build", "dist"}


def files(root: Path, *rooms: str, suffixes: tuple[str, ...] = WRITTEN) -> Iterator[Path]:
    """Written files below the rooms of `root`, in a fixed order, without what tools made."""
    for room in rooms:
        for path in sorted((root / room).rglob("*")):
            inside = path.relative_to(root).parts
            hidden = any(part.startswith(".") or part in NOT_OURS for part in inside)
            if (
                path.is_file()
                and path.suffix in suffixes
                and not hidden
                and not _generated(path)
            ):
                yield path


def _generated(path: Path) -> bool:
    """Cython writes name.c beside name.pyx."""
    return path.suffix == ".c" and path.with_suffix(".pyx").exists()


def copy(destination: Path, *rooms: str) -> Path:
    """A copy of the written files of some rooms, in which a test plants a fault."""
    for path in files(ROOT, *rooms):
        target = destination / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return destination


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
