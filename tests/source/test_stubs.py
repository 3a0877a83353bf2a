"""The stubs of the compiled modules agree with what was built."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import gate
import pytest
import tree

ALLOWED = Path(__file__).with_name("stubtest_allowlist.txt")

pytestmark = pytest.mark.timeout(300)


def compiled_modules(root: Path) -> list[str]:
    """The modules that the tree has Cython source for."""
    return [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in tree.files(root, "pynccl", suffixes=(".pyx",))
    ]


def stubtest(modules: list[str], folder: Path, cwd: Path) -> str:
    """What stubtest says of modules that lie below `folder`."""
    # A site folder is searched anyway, and mypy refuses to be pointed at one.
    site = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    search = {} if folder in site else {"PYTHONPATH": str(folder), "MYPYPATH": str(folder)}
    options = [
        "--ignore-disjoint-bases",
        "--ignore-unused-allowlist",
        "--allowlist",
        str(ALLOWED),
    ]
    return gate.complaint([gate.tool("stubtest"), *options, *modules], cwd, **search)


def test_every_compiled_module_has_a_stub() -> None:
    bare = [
        path.relative_to(tree.ROOT).as_posix()
        for path in tree.files(tree.ROOT, "pynccl", suffixes=(".pyx",))
        if not path.with_suffix(".pyi").exists()
    ]
    assert bare == []


def test_stubs_agree_with_the_built_modules(tmp_path: Path) -> None:
    modules = compiled_modules(tree.ROOT)
    specs = [importlib.util.find_spec(module) for module in modules]
    missing = [m for m, s in zip(modules, specs, strict=True) if s is None or not s.origin]
    if missing:
        pytest.fail(f"not built, so their stubs cannot be checked: {missing}", pytrace=False)
    origins = {Path(spec.origin or "").parents[2] for spec in specs if spec}
    assert len(origins) <= 1
    for folder in origins:
        if complaint := stubtest(modules, folder, tmp_path):
            pytest.fail(complaint, pytrace=False)


MODULE = '''
cdef class Box:
    """A box."""
    def put(self, int value, *, bint twice=False):
        """Put."""
'''
SETUP = """
from Cython.Build import cythonize
from setuptools import setup
setup(ext_modules=cythonize("box/lid.pyx", compiler_directives={
    "language_level": 3, "embedsignature": True, "embedsignature.format": "python"}))
"""


def test_a_wrong_stub_is_caught(tmp_path: Path) -> None:
    tree.write(tmp_path, "box/__init__.py", "")
    tree.write(tmp_path, "box/lid.pyx", MODULE)
    tree.write(tmp_path, "setup.py", SETUP)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tmp_path,
        env={**os.environ, "CFLAGS": "-O0 -w"},
        capture_output=True,
        timeout=200,
        check=True,
    )
    tree.write(
        tmp_path,
        "box/lid.pyi",
        "class Box:\n    def put(self, value: int, *, twice: bool = False) -> None: ...\n",
    )
    assert stubtest(["box.lid"], tmp_path, tmp_path) == ""
    tree.write(
        tmp_path, "box/lid.pyi", "class Box:\n    def put(self, value: int) -> None: ...\n"
    )
    assert 'put is inconsistent, stub does not have parameter "twice"' in stubtest(
        ["box.lid"], tmp_path, tmp_path
    )
