"""Run the tools of the style gate, and give back what they complain about."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import tree

C_WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wstrict-prototypes", "-Werror")
# Folders of tests whose modules import each other by bare names; each is checked by itself.
TYPED_TESTS = ("tests/support", "tests/abi", "tests/source")


def tool(name: str) -> str:
    """The path of a tool of the test extra, beside the interpreter or on PATH."""
    found = shutil.which(name, path=_tool_path())
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: it comes with pynccl-aio[test]")
    return found


def _tool_path() -> str:
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def complaint(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """What a tool prints when it is not content; empty when it is."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PATH": _tool_path(), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return (
        ""
        if done.returncode == 0
        else f"{done.stdout}{done.stderr}" or f"exit {done.returncode}"
    )


def settings(root: Path) -> Path:
    """Give a planted tree the settings of this project."""
    for name in ("pyproject.toml", ".clang-format"):
        shutil.copyfile(tree.ROOT / name, root / name)
    return root


def ruff_check(root: Path) -> str:
    return complaint(
        [tool("ruff"), "check", "--no-cache", "--output-format=concise", "."], root
    )


def ruff_format(root: Path) -> str:
    return complaint([tool("ruff"), "format", "--no-cache", "--check", "--diff", "."], root)


def mypy(root: Path, folder: str) -> str:
    """What mypy says of the files of one folder; what they import answers for itself."""
    search = os.pathsep.join([folder, "tests"]) if folder.startswith("tests/") else ""
    command = [tool("mypy"), "--follow-imports=silent", folder]
    return complaint(command, root, MYPYPATH=search)


def cython_lint(root: Path) -> str:
    sources = list(tree.files(root, "pynccl", suffixes=(".pyx", ".pxd")))
    return complaint([tool("cython-lint"), *sources], root) if sources else ""


def cythonize(root: Path, output: Path) -> str:
    """What Cython warns of, in every module."""
    # All of -Wextra but "maybe uninitialized", which takes every C out parameter for a mistake.
    warnings = ["-Werror", "-X", "warn.unused=True", "-X", "warn.unreachable=True"]
    found = [
        complaint(
            [tool("cython"), "-3", *warnings, source, "-o", output / f"{source.stem}.c"], root
        )
        for source in tree.files(root, "pynccl", suffixes=(".pyx",))
    ]
    return "".join(found)


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "")) or [tool("cc")]


def c_compile(root: Path) -> str:
    """What the C compiler says of each source and each header of src, taken by itself."""
    found = [
        complaint(
            [
                *compiler(),
                "-x",
                "c",
                "-std=gnu11",
                "-O1",
                *C_WARNINGS,
                "-c",
                source,
                "-o",
                os.devnull,
            ],
            root,
        )
        for source in tree.files(root, "src", suffixes=(".c", ".h"))
    ]
    return "".join(found)


def clang_format(root: Path) -> str:
    sources = list(tree.files(root, "src", "tests", "examples", suffixes=(".c", ".h")))
    return (
        complaint([tool("clang-format"), "--dry-run", "-Werror", *sources], root)
        if sources
        else ""
    )
