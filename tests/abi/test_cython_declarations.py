"""The .pxd files declare what the headers of src declare."""

from __future__ import annotations

from pathlib import Path

import cython_declarations
import pytest
from declarations import ROOT

FILES = sorted((ROOT / "pynccl" / "_native").glob("*.pxd"))


def test_there_is_something_to_check() -> None:
    read = [b for path in FILES for b in cython_declarations.read_pxd(path.read_text("utf-8"))]
    assert {"abi/nccl_abi.h", "abi/cuda_abi.h", "abi/dlpack_abi.h"} <= {b.header for b in read}
    assert sum(len(block.types) for block in read) > 50


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_declarations_are_those_of_the_headers(path: Path, tmp_path: Path) -> None:
    assert cython_declarations.complaint(path.read_text("utf-8"), tmp_path) == ""


# ---- the guards can fail ---------------------------------------------------------------------

HEADER = """
#include <stddef.h>
#define LIMIT 3
typedef enum { RED, GREEN } colour_t;
typedef struct {
    size_t count;
    char name[8];
    _Bool full;
    int (*call)(size_t count, colour_t colour);
} box_t;
int put(box_t *box, size_t count);
void quit(void);
"""
PXD = """
from libc.stdint cimport int32_t  # not C

cdef extern from "box.h" nogil:
    ctypedef int colour_t
    ctypedef enum again_t:
        RED, GREEN
    ctypedef struct box_t:
        size_t count
        char name[8]
        bint full
        int (*call)(size_t count, colour_t colour) noexcept
    int put(box_t *box,
            size_t count) except? -1
    void quit() noexcept
    int LIMIT

cdef class Box:
    cdef box_t *c
"""


def test_a_true_pxd_is_taken(tmp_path: Path) -> None:
    (tmp_path / "box.h").write_text(HEADER)
    assert cython_declarations.complaint(PXD, tmp_path, tmp_path) == ""


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("        size_t count\n", "        int count\n", "((box_t *)0)->count is not: int"),
        ("bint full", "char full", "->full is not: char"),
        ("name[8]", "name[16]", "->name is not: char [16]"),
        ("(*call)(size_t count,", "(*call)(int count,", "->call is not: int (*)(int count"),
        ("            size_t count)", "            int count)", "put is not"),
        ("void quit", "int quit", "quit is not"),
        ("LIMIT", "LIMITS", "LIMITS"),
        ("GREEN", "BLUE", "BLUE"),
    ],
)
def test_a_wrong_declaration_is_caught(tmp_path: Path, old: str, new: str, named: str) -> None:
    (tmp_path / "box.h").write_text(HEADER)
    assert PXD.count(old) == 1
    assert named in cython_declarations.complaint(PXD.replace(old, new), tmp_path, tmp_path)


def test_a_declaration_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot read"):
        cython_declarations.read_pxd('cdef extern from "a.h":\n    int a = 3\n')
