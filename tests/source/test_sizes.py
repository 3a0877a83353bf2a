"""Files stay small, say what they are, and hold no promises and no traces of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import sizes
import tree


@pytest.mark.parametrize("check", [sizes.too_long, sizes.vague_names, sizes.bad_words])
def test_tree_is_in_order(check: object) -> None:
    assert callable(check)
    assert check(tree.ROOT) == []


def test_the_checks_see_the_tree() -> None:
    """A check of no files passes, and would go on passing after a move of the folders."""
    seen = {
        path.relative_to(tree.ROOT).as_posix() for path in tree.files(tree.ROOT, *tree.ROOMS)
    }
    assert {"src/abi/symbols.h", "src/host/host.h", "tests/source/sizes.py"} <= seen


@pytest.mark.parametrize(
    "name", ["src/host/a.c", "pynccl/a.pyx", "tests/a.py", "examples/a.py"]
)
def test_a_long_file_is_caught(tmp_path: Path, name: str) -> None:
    tree.write(tmp_path, name, "\n" * 500)
    assert sizes.too_long(tmp_path) == []
    tree.write(tmp_path, name, "\n" * 501)
    assert sizes.too_long(tmp_path) == [f"{name}: 501 lines, over 500"]


@pytest.mark.parametrize(
    "name", ["pynccl/_utils.py", "src/host/common.h", "tests/helpers/a.py"]
)
def test_a_vague_name_is_caught(tmp_path: Path, name: str) -> None:
    tree.write(tmp_path, name, "")
    assert sizes.vague_names(tmp_path) == [f"{name}: says nothing of what is in it"]


@pytest.mark.parametrize(
    "line",
    [
        "# TO" + "DO: later",
        "/* X" + "XX */",
        "a = '/ho" + "me/me/x'",
        "# \u201cquoted\u201d",
        "a =\u00a01",
    ],
)
def test_a_bad_word_is_caught(tmp_path: Path, line: str) -> None:
    tree.write(tmp_path, "pynccl/a.py", f"\n{line}\n")
    assert len(sizes.bad_words(tmp_path)) == 1
    assert sizes.bad_words(tmp_path)[0].startswith("pynccl/a.py:2: ")


@pytest.mark.parametrize(
    "line", ["root / 'work' / x", "https://example.org/home/x", "../work/x"]
)
def test_an_ordinary_path_is_none(tmp_path: Path, line: str) -> None:
    tree.write(tmp_path, "pynccl/a.py", f"{line}\n")
    assert sizes.bad_words(tmp_path) == []


def test_what_cython_wrote_is_not_ours(tmp_path: Path) -> None:
    tree.write(tmp_path, "pynccl/_native/engine.pyx", "")
    tree.write(tmp_path, "pynccl/_native/engine.c", "\n" * 9000)
    assert sizes.too_long(tmp_path) == []
