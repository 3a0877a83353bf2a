"""The table of cases is whole, and the tests that it names exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from cases import COVERED, NOT_HERE, PARTLY, PARTS

TESTS = Path(__file__).parents[1]


@cache
def functions(file: Path) -> frozenset[str]:
    """The test functions at the top level of a file."""
    body = ast.parse(file.read_text("utf-8")).body
    return frozenset(
        node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def missing(nodes: tuple[str, ...]) -> list[str]:
    """Those of the named tests that do not exist."""
    gone = []
    for node in nodes:
        file, _, function = node.partition("::")
        path = TESTS / file
        if not path.is_file() or function not in functions(path):
            gone.append(node)
    return gone


@pytest.mark.parametrize("number", COVERED)
def test_the_tests_of_a_case_exist(number: int) -> None:
    assert COVERED[number]
    assert missing(COVERED[number]) == []


@pytest.mark.parametrize("part", PARTS)
def test_every_case_of_a_part_has_its_place(part: str) -> None:
    assert [n for n in PARTS[part] if (n in COVERED) == (n in NOT_HERE)] == []


def test_nothing_else_is_in_the_table() -> None:
    known = {number for numbers in PARTS.values() for number in numbers}
    assert {*COVERED, *NOT_HERE, *PARTLY} <= known
    assert set(PARTLY) <= set(COVERED)
    assert all(reason.endswith(".") for reason in (*NOT_HERE.values(), *PARTLY.values()))


def test_a_test_that_does_not_exist_is_caught() -> None:
    here = "source/test_cases.py::test_a_test_that_does_not_exist_is_caught"
    wrong = ("source/test_cases.py::test_of_nothing", "source/no_file.py::test_of_nothing")
    assert missing((here, *wrong)) == list(wrong)
