"""The public names are listed and described, and importing them costs nothing."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import subprocess
import sys
import types
from pathlib import Path

import exports
import pytest
import tree

SYMBOLS = (tree.ROOT / "src" / "abi" / "symbols.h").read_text("utf-8")
IMPORT_LIMIT_MS = 50.0


def test_names_are_listed() -> None:
    assert [
        b for module in exports.public_modules() for b in exports.export_breaches(module)
    ] == []


def test_names_are_described() -> None:
    found = [
        b for module in exports.public_modules() for b in exports.docstring_breaches(module)
    ]
    assert found == []


def test_operations_name_their_c_functions() -> None:
    communicator = importlib.import_module("pynccl").Communicator
    assert exports.c_name_breaches(communicator, SYMBOLS) == []


# ---- what an import does ---------------------------------------------------------------------

# Runs in a fresh interpreter. NumPy and asyncio are paid for by whoever uses arrays and loops.
IMPORT = """
import asyncio, json, os, sys, threading, time
import numpy

def state():
    with open("/proc/self/maps") as maps:
        libraries = {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            pass  # the descriptor of the listing itself
    return libraries, sorted(links), len(os.listdir("/proc/self/task"))

class Watched(type(os.environ)):
    def __getitem__(self, key):
        seen.append(key)
        return super().__getitem__(key)

seen = []
libraries, files, threads = state()
os.environ.__class__ = Watched
start = time.perf_counter_ns()
import NAME
elapsed = time.perf_counter_ns() - start
os.environ.__class__ = Watched.__base__
libraries_after, files_after, threads_after = state()
for link in files:
    files_after.remove(link)
print(json.dumps({
    "ms": elapsed / 1e6,
    "libraries": sorted(libraries_after - libraries),
    "files": files_after,
    "threads": threads_after - threads,
    "environment": sorted(set(seen)),
}))
"""


def import_costs(name: str, folder: Path | None = None) -> dict[str, object]:
    """What importing a module did to a fresh process; `folder` is where to find it first."""
    path = [f"import sys; sys.path.insert(0, {str(folder)!r})"] if folder else []
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*path, IMPORT.replace("NAME", name)])],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    costs: dict[str, object] = json.loads(done.stdout)
    return costs


def import_breaches(costs: dict[str, object], package: Path) -> list[str]:
    """What an import did beyond loading code of the package itself and of the interpreter."""
    libraries = costs["libraries"]
    assert isinstance(libraries, list)
    own = (Path(sys.base_prefix) / "lib", package)
    breaches = [
        f"opens {library}"
        for library in libraries
        if not any(Path(library).is_relative_to(folder) for folder in own)
        or re.match(r"libpynccl_(?!bind)", Path(library).name)  # an engine
    ]
    breaches += [
        f"{what}: {costs[what]}" for what in ("files", "threads", "environment") if costs[what]
    ]
    return breaches


def test_import_is_free() -> None:
    spec = importlib.util.find_spec("pynccl")
    assert spec is not None
    assert spec.origin is not None
    assert import_breaches(import_costs("pynccl"), Path(spec.origin).parent) == []


@pytest.mark.timing
def test_import_is_quick() -> None:
    times = [import_costs("pynccl")["ms"] for _ in range(7)]
    assert statistics.median(t for t in times if isinstance(t, float)) < IMPORT_LIMIT_MS


# ---- the guards can fail ---------------------------------------------------------------------


def planted(name: str, **names: object) -> types.ModuleType:
    module = types.ModuleType(name)
    for key, value in names.items():
        setattr(module, key, value)
    return module


def test_a_wrong_list_of_names_is_caught() -> None:
    class Shown:
        __module__ = "pynccl"

    module = planted("pynccl", __all__=["b", "a", "gone"], a=1, b=2, Shown=Shown, os=types)
    assert exports.export_breaches(module) == [
        "pynccl: __all__ is not sorted and unique",
        "pynccl: __all__ names gone, which is not there",
        "pynccl: shows Shown, which __all__ does not name",
    ]
    assert exports.export_breaches(planted("pynccl.types")) == ["pynccl.types: has no __all__"]


def test_a_missing_docstring_is_caught() -> None:
    class Described:
        """A class."""

        def method(self) -> None: ...

        @property
        def size(self) -> int:
            return 1

        @classmethod
        def create(cls) -> None:
            """Make one."""

    module = planted("pynccl", __all__=["Described"], Described=Described)
    assert exports.docstring_breaches(module) == [
        "pynccl.Described.method: has no docstring",
        "pynccl.Described.size: has no docstring",
    ]


def test_an_operation_that_does_not_name_its_function_is_caught() -> None:
    class Communicator:
        def all_reduce(self) -> None:
            """Reduce (ncclAllReduce)."""

        def all_to_all(self) -> None:
            """Exchange."""

        def split(self) -> None:
            """Split by color: ncclCommSplit."""

    assert exports.c_name_breaches(Communicator, SYMBOLS) == [
        "Communicator.all_to_all: does not name ncclAlltoAll"
    ]


@pytest.mark.parametrize(
    ("text", "breach"),
    [
        (
            "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()",
            "threads: 1",
        ),
        ("kept = open('/dev/null')", "files: ['/dev/null']"),
        ("import os\nos.environ.get('PYNCCL_ENGINE')", "environment: ['PYNCCL_ENGINE']"),
        ("import os\nos.getenv('HOME')", "environment: ['HOME']"),
    ],
    ids=["thread", "file", "environment", "getenv"],
)
def test_a_costly_import_is_caught(tmp_path: Path, text: str, breach: str) -> None:
    tree.write(tmp_path, "planted.py", text + "\n")
    assert breach in import_breaches(import_costs("planted", tmp_path), tmp_path)


@pytest.mark.parametrize("name", ["elsewhere/liba.so", "package/libpynccl_host.so"])
def test_a_library_opened_at_import_is_caught(tmp_path: Path, name: str) -> None:
    source = tree.write(tmp_path, "a.c", "int a;\n")
    library = tree.write(tmp_path, name, "")
    subprocess.run(["cc", "-shared", source, "-o", library], check=True)
    tree.write(tmp_path, "planted.py", f"import ctypes\nctypes.CDLL({str(library)!r})\n")
    costs = import_costs("planted", tmp_path)
    assert f"opens {library}" in import_breaches(costs, tmp_path / "package")


def test_a_slow_import_is_caught(tmp_path: Path) -> None:
    tree.write(tmp_path, "planted.py", "import time\ntime.sleep(0.06)\n")
    milliseconds = import_costs("planted", tmp_path)["ms"]
    assert isinstance(milliseconds, float)
    assert milliseconds > IMPORT_LIMIT_MS
