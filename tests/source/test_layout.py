"""Imports and includes go down only, as the rooms of the project say."""

from __future__ import annotations

from pathlib import Path

import layout
import pytest
import tree

CHECKS = (
    layout.python_arrows,
    layout.python_cycles,
    layout.module_names,
    layout.extern_declarations,
    layout.c_arrows,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_tree_is_in_order(check: object) -> None:
    assert callable(check)
    assert check(tree.ROOT) == []


# ---- the guards can fail: one planted fault each ---------------------------------------------


@pytest.mark.parametrize(
    ("file", "text", "breach"),
    [
        ("_work.py", "from pynccl._reactor import Reactor", "_reactor, which is above it"),
        (
            "_work.py",
            "def f():\n    from pynccl import _reactor",
            "_reactor, which is above it",
        ),
        ("_work.py", "import pynccl._communicator", "_communicator, which is above it"),
        ("_work.py", "from pynccl import connect", "imports pynccl, which is above it"),
        ("_native/view.pyx", "from pynccl._native.ops cimport issue", "ops, which is above it"),
        (
            "_native/view.pyx",
            "from .ops cimport (\n    issue,\n    drain)",
            "ops, which is above it",
        ),
        ("_native/engine.pxd", "cimport pynccl._native.handles", "handles, which is above it"),
        ("_native/engine.pxd", "from . cimport abi, handles", "handles, which is above it"),
        (
            "_bootstrap/session.py",
            "from pynccl._native import engine",
            "may see only pynccl.errors",
        ),
        ("_bootstrap/session.py", "from ..types import Op", "may see only pynccl.errors"),
        ("strange.py", "", "pynccl.strange: stands in no layer"),
        ("_native/strange.pyx", "", "pynccl._native.strange: stands in no layer"),
    ],
)
def test_an_arrow_that_runs_up_is_caught(
    tmp_path: Path, file: str, text: str, breach: str
) -> None:
    tree.write(tmp_path, "pynccl/_communicator.py", "")
    tree.write(tmp_path, f"pynccl/{file}", text)
    assert breach in "\n".join(layout.python_arrows(tmp_path))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("_reactor.py", "from pynccl._work import Work\nimport pynccl.errors, asyncio\n"),
        (
            "_native/ops.pyx",
            "from pynccl._native.view cimport View  # and ops itself\nimport numpy\n",
        ),
        ("_bootstrap/session.py", "from . import frames\nfrom .frames import Frame\n"),
        ("_tools/bench.py", "import pynccl\nfrom pynccl._tools import info\n"),
        ("testing.py", "from pynccl import connect\n"),
        ("__init__.py", "from ._communicator import Communicator as Communicator\n"),
    ],
)
def test_an_arrow_that_runs_down_is_none(tmp_path: Path, file: str, text: str) -> None:
    tree.write(tmp_path, f"pynccl/{file}", text)
    assert layout.python_arrows(tmp_path) == []


def test_a_circle_is_caught(tmp_path: Path) -> None:
    tree.write(tmp_path, "pynccl/_group.py", "from pynccl._stream import Stream\n")
    tree.write(tmp_path, "pynccl/_stream.py", "from pynccl import _group\n")
    assert layout.python_cycles(tmp_path) == [
        "pynccl._group -> pynccl._stream -> pynccl._group"
    ]


def test_a_module_without_its_underscore_is_caught(tmp_path: Path) -> None:
    tree.write(tmp_path, "pynccl/work.py", "")
    tree.write(tmp_path, "pynccl/_work.py", "")
    tree.write(tmp_path, "pynccl/errors.py", "")
    assert layout.module_names(tmp_path) == [
        "pynccl/work.py: neither a public module nor private (_work.py)"
    ]


@pytest.mark.parametrize(
    ("file", "text", "breach"),
    [
        ("engine.pyx", 'cdef extern from "bind/bind.h":\n    pass\n', "belongs in abi.pxd"),
        ("engine.pxd", "cdef extern from '<dlfcn.h>':\n    pass\n", "belongs in abi.pxd"),
        ("abi.pxd", 'cdef extern from *:\n    """static int a;"""\n', "belongs in src/bind"),
        ("engine.pyx", 'include "shared.pxi"\n', "includes another"),
    ],
)
def test_c_in_cython_is_caught(tmp_path: Path, file: str, text: str, breach: str) -> None:
    tree.write(tmp_path, f"pynccl/_native/{file}", text)
    assert breach in "\n".join(layout.extern_declarations(tmp_path))


def test_declarations_in_their_place_are_none(tmp_path: Path) -> None:
    tree.write(
        tmp_path, "pynccl/_native/abi.pxd", 'cdef extern from "bind/bind.h":\n    pass\n'
    )
    tree.write(tmp_path, "pynccl/_native/a.pyx", 'cdef extern from "Python.h":\n    pass\n')
    assert layout.extern_declarations(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "text", "breach"),
    [
        ("bind/loader.c", '#include "../host/host.h"', "bind knows only"),
        ("host/driver_stream.c", '#include "../bind/loader.h"', "host knows only"),
        ("abi/nccl_abi.h", '#include "../host/host.h"', "abi knows only"),
        ("host/reduce.c", '#include "../../vendor/x.h"', "host knows only"),
        ("bind/loader.c", "#include <Python.h>", "includes <Python.h>"),
        ("bind/loader.c", "# include <cuda_runtime.h>", "includes <cuda_runtime.h>"),
        ("glue/a.c", "", "a room that has no rule"),
    ],
)
def test_an_include_that_leaves_its_room_is_caught(
    tmp_path: Path, file: str, text: str, breach: str
) -> None:
    tree.write(tmp_path, f"src/{file}", text + "\n")
    assert breach in "\n".join(layout.c_arrows(tmp_path))


def test_an_include_within_reach_is_none(tmp_path: Path) -> None:
    tree.write(
        tmp_path,
        "src/host/a.c",
        '#include "host.h"\n#include "../abi/symbols.h"\n#include <time.h>\n',
    )
    assert layout.c_arrows(tmp_path) == []
