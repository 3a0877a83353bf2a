"""Which tests measure time: those must be marked, and run with the machine to themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MEASURES = {"heartbeat"}
"""Modules of the tests whose verdict is a time."""
CLOCKS = {"perf_counter", "monotonic", "perf_counter_ns", "monotonic_ns", "elapsed"}
TIGHT_S = 0.25
"""An upper bound below this is missed when other tests take the cores."""


def unmarked(path: Path) -> Iterator[str]:
    """The tests of a file that measure time and lack the mark `timing`."""
    tree = ast.parse(path.read_text("utf-8"))
    if any(_marked(mark) for mark in _module_marks(tree)):
        return
    if any(MEASURES & set(_imported(node)) for node in tree.body):
        yield f"{path.name} imports {' or '.join(MEASURES)}"
    for test in ast.walk(tree):
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef):
            tight = any(_is_tight(node) for node in ast.walk(test))
            if tight and not any(_marked(mark) for mark in test.decorator_list):
                yield f"{path.name}:{test.lineno} {test.name} asserts less than {TIGHT_S} s"


def _module_marks(tree: ast.Module) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield node.value


def _marked(mark: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == "timing" for node in ast.walk(mark)
    )


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [name.name for name in node.names] if isinstance(node, ast.Import) else []


def _is_tight(node: ast.AST) -> bool:
    """Whether it is `assert ... clock ... < number` with a small number."""
    if not isinstance(node, ast.Assert) or not isinstance(node.test, ast.Compare):
        return False
    compare, bound = node.test, node.test.comparators[-1]
    names = {
        word
        for operand in (compare.left, *compare.comparators)
        for part in ast.walk(operand)
        for word in (getattr(part, "attr", ""), getattr(part, "id", ""))
    }
    return (
        isinstance(compare.ops[-1], ast.Lt | ast.LtE)
        and isinstance(bound, ast.Constant)
        and isinstance(bound.value, int | float)
        and bound.value < TIGHT_S
        and bool(names & CLOCKS)
    )
