"""What the engines show to the dynamic linker: the names of src/abi's lists, and no more.

A stray export could shadow a function of another library in the process; a missing one is a
function that the binding would take for an old NCCL.
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
from pathlib import Path

import engines
from support.symbols import other_symbols, our_symbols

REQUIRED = {symbol.name for symbol in our_symbols() if symbol.required}
LISTED = {symbol.name for symbol in our_symbols()}
OTHERS = {symbol.name for symbol in other_symbols()}


def defined(library: Path, *options: str) -> set[str]:
    """The names that a shared object defines."""
    done = subprocess.run(
        ["nm", "--defined-only", "--format=posix", *options, library],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {line.split()[0].partition("@")[0] for line in done.stdout.splitlines()}


def exported(library: Path) -> set[str]:
    """The names that a shared object defines for others."""
    return defined(library, "-D")


def repeated(libraries: list[Path]) -> dict[str, list[str]]:
    """Names of the engine room that more than one library defines, with the libraries."""
    homes: dict[str, list[str]] = {}
    for library in libraries:
        for name in defined(library):
            if name.startswith("pn_"):
                homes.setdefault(name, []).append(library.name)
    return {name: files for name, files in homes.items() if len(files) > 1}


def test_host_engine_exports_the_lists(tmp_path: Path) -> None:
    names = exported(engines.build_host_engine(tmp_path))
    listed = LISTED | OTHERS
    assert listed - names == set()
    assert {name for name in names - listed if not name.startswith("pn_host_")} == set()


def test_noop_engine_exports_nothing_but_the_list(tmp_path: Path) -> None:
    # What passes on it needs no more than the list: no back door into an engine of ours.
    names = exported(engines.build_noop_engine(tmp_path))
    assert REQUIRED - names == set()
    assert names - LISTED == set()


def test_the_host_engine_has_both_names_of_each_function() -> None:
    """Libraries that stand between a program and NCCL call the second name, pnccl..."""
    package = importlib.import_module("pynccl._native")
    library = ctypes.CDLL(str(Path(package.__path__[0]) / "libpynccl_host.so"))
    names = [s.name for s in (*our_symbols(), *other_symbols()) if s.library == "nccl"]
    addresses = {
        name: [ctypes.cast(library[n], ctypes.c_void_p).value for n in (name, f"p{name}")]
        for name in names
    }
    assert {name for name, (first, second) in addresses.items() if first != second} == set()


def test_exports_are_seen(tmp_path: Path) -> None:
    source = tmp_path / "a.c"
    source.write_text(
        '__attribute__((visibility("default"))) int shown;\nint hidden;\nstatic int own;\n'
        "int *use(void);\nint *use(void) { return &own; }\n"
    )
    assert exported(engines.build_shared([source], tmp_path / "liba.so")) == {"shown"}


def test_static_state_exists_once() -> None:
    """A C file that two extensions link has its state twice, each blind to the other."""
    package = importlib.import_module("pynccl._native")
    libraries = sorted(Path(package.__path__[0]).glob("*.so"))
    assert any("bind" in library.name for library in libraries), libraries
    assert repeated(libraries) == {}


def test_state_that_exists_twice_is_caught(tmp_path: Path) -> None:
    source = tmp_path / "a.c"
    source.write_text(
        "int pn_state;\nstatic int own;\nint *use(void);\nint *use(void) { return &own; }\n"
    )
    libraries = [engines.build_shared([source], tmp_path / f"lib{n}.so") for n in "ab"]
    assert repeated(libraries) == {"pn_state": ["liba.so", "libb.so"]}
