"""The style gate: each tool is content with the tree, and is not with a planted fault."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import gate
import pytest
import tree

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

WHOLE_TREE = (
    gate.ruff_check,
    gate.ruff_format,
    gate.cython_lint,
    gate.c_compile,
    gate.clang_format,
)
TYPED = ("pynccl", *gate.TYPED_TESTS)

pytestmark = pytest.mark.timeout(300)


def content(complaint: str) -> None:
    """Fail with what a tool said, in full and with nothing around it."""
    if complaint:
        pytest.fail(complaint, pytrace=False)


@pytest.mark.parametrize("check", WHOLE_TREE, ids=lambda check: check.__name__)
def test_tree_is_in_order(check: Callable[[Path], str]) -> None:
    content(check(tree.ROOT))


@pytest.mark.parametrize("folder", TYPED)
def test_types(folder: str) -> None:
    content(gate.mypy(tree.ROOT, folder))


def test_cython_has_no_warnings(tmp_path: Path) -> None:
    content(gate.cythonize(tree.ROOT, tmp_path))


# ---- the guards can fail ---------------------------------------------------------------------

PLANTED = [
    (gate.ruff_check, "pynccl/a.py", '"""A."""\nimport os\n', "F401"),
    (gate.ruff_check, "pynccl/a.py", '"""A."""\n\n\ndef f(x):\n    """Do."""\n', "ANN001"),
    (gate.ruff_check, "pynccl/a.py", "A = 1\n", "D100"),
    (gate.ruff_check, "tests/a.py", f'A = "{"a" * 100}"\n', "E501"),
    (
        gate.ruff_check,
        "pynccl/a.py",
        '"""A."""\n\nimport time\n\n\n'
        'async def f() -> None:\n    """Do."""\n    time.sleep(1)\n',
        "ASYNC251",
    ),
    (gate.ruff_format, "tests/a.py", "A = ( 1,2 )\n", "A = (1, 2)"),
    (gate.cython_lint, "pynccl/_native/a.pyx", "import os\n", "'os' imported but unused"),
    (gate.cython_lint, "pynccl/_native/a.pxd", f"# {'a ' * 50}a\n", "E501"),
    (
        gate.c_compile,
        "src/host/a.c",
        "char f(int a);\nchar f(int a) {\n    return a;\n}\n",
        "conversion",
    ),
    (gate.c_compile, "src/host/a.c", "int f();\n", "strict-prototypes"),
    (
        gate.c_compile,
        "src/host/a.c",
        "int f(int a);\nint f(int a) {\n"
        "    {\n        int a = 1;\n        return a;\n    }\n}\n",
        "shadow",
    ),
    (gate.c_compile, "src/host/a.h", "extern size_t alone;\n", "unknown type name"),
    (gate.clang_format, "src/host/a.c", "int  a;\n", "clang-format-violations"),
    (gate.clang_format, "src/host/a.c", "int *a;\nint* b;\n", "clang-format-violations"),
]


@pytest.mark.parametrize(
    ("check", "name", "text", "complaint"),
    PLANTED,
    ids=[
        f"{check.__name__}-{complaint}-{at}"
        for at, (check, _, _, complaint) in enumerate(PLANTED)
    ],
)
def test_a_fault_is_caught(
    tmp_path: Path, check: Callable[[Path], str], name: str, text: str, complaint: str
) -> None:
    gate.settings(tmp_path)
    tree.write(tmp_path, name, text)
    assert complaint in check(tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def f(x): return x\n", "no-untyped-def"),
        ("def f() -> int:\n    return ''\n", "return-value"),
        ("def f(x: list) -> None: ...\n", "type-arg"),
    ],
)
def test_a_wrong_type_is_caught(tmp_path: Path, text: str, complaint: str) -> None:
    gate.settings(tmp_path)
    tree.write(tmp_path, "pynccl/__init__.py", text)
    assert complaint in gate.mypy(tmp_path, "pynccl")


def test_a_cython_warning_is_caught(tmp_path: Path) -> None:
    tree.write(tmp_path, "pynccl/__init__.py", "")
    tree.write(tmp_path, "pynccl/a.pyx", "def f():\n    x = 1\n    return 2\n")
    assert "Unused" in gate.cythonize(tmp_path, tmp_path) or "unused" in gate.cythonize(
        tmp_path, tmp_path
    )


def switched_off(settings: str) -> list[str]:
    """Type checks that the text of a pyproject.toml takes back; unknown libraries are none."""
    return [
        f"{override['module']}: {key}"
        for override in tomllib.loads(settings)["tool"]["mypy"].get("overrides", [])
        for key in override.keys() - {"module", "ignore_missing_imports"}
    ]


def test_no_type_check_is_switched_off() -> None:
    """Strict typing that a module switches off is not strict."""
    assert switched_off((tree.ROOT / "pyproject.toml").read_text("utf-8")) == []
    files = tree.files(tree.ROOT, "pynccl", "tests", suffixes=(".py", ".pyi"))
    mark = "# mypy:" + " ignore-errors"
    assert [path for path in files if mark in path.read_text("utf-8")] == []


def test_a_type_check_that_is_switched_off_is_caught() -> None:
    settings = "[tool.mypy]\nstrict = true\n[[tool.mypy.overrides]]\nmodule = 'pynccl._work'\n"
    assert switched_off(settings) == []
    assert switched_off(settings + "ignore_errors = true\n") == ["pynccl._work: ignore_errors"]
