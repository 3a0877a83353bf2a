"""The loader fills its tables from whatever library it is given, or says what is wrong with it.

It is compiled by itself and called through ctypes: these are its own rules, below any Python.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import engines
import pytest
from declarations import ROOT
from support.symbols import Symbol, our_symbols

OPTIONAL = [symbol for symbol in our_symbols() if not symbol.required]
REQUIRED = [symbol for symbol in our_symbols() if symbol.required]


class Loader:
    """The C functions of loader.h."""

    def __init__(self, library: Path) -> None:
        functions = ctypes.CDLL(str(library))
        self._open = functions.pn_engine_open
        self._open.restype = ctypes.c_void_p
        self._symbol = functions.pn_engine_symbol
        self._symbol.restype = ctypes.c_void_p
        self._path = functions.pn_engine_path
        self._path.restype = ctypes.c_char_p
        self._since = functions.pn_nccl_since

    def open(self, nccl: Path, cuda: Path) -> tuple[int | None, str]:
        """The engine's address, or None and the reason."""
        why = ctypes.create_string_buffer(512)
        size = ctypes.c_size_t(len(why))
        engine = self._open(str(nccl).encode(), str(cuda).encode(), why, size)
        return engine, why.value.decode()

    def symbol(self, engine: int | None, name: str) -> int | None:
        address: int | None = self._symbol(ctypes.c_void_p(engine), name.encode())
        return address

    def path(self, engine: int | None, name: str) -> str | None:
        path: bytes | None = self._path(ctypes.c_void_p(engine), name.encode())
        return path.decode() if path else None

    def since(self, name: str) -> int:
        release: int = self._since(name.encode())
        return release

    def call_version(self, engine: int | None) -> int:
        version = ctypes.c_int()
        address = self.symbol(engine, "ncclGetVersion")
        assert address is not None
        assert (
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address)(ctypes.byref(version)) == 0
        )
        return version.value


@pytest.fixture(scope="session")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    output = tmp_path_factory.mktemp("loader") / "libloader.so"
    source = ROOT / "src" / "bind" / "loader.c"
    return Loader(engines.build_shared([source], output, "-fvisibility=default", "-ldl"))


def test_the_real_library_is_filled_whole(
    loader: Loader, hollow: Callable[..., Path], nccl_wheel: Path
) -> None:
    library = nccl_wheel / "lib" / "libnccl.so.2"
    engine, why = loader.open(library, hollow())
    assert engine, why
    header = (nccl_wheel / "include" / "nccl.h").read_text("utf-8")
    code = re.search(r"#define NCCL_VERSION_CODE (\d+)", header)
    assert code is not None
    assert loader.call_version(engine) == int(code[1])
    for symbol in our_symbols():
        path = loader.path(engine, symbol.name)
        assert path is not None, symbol.name
        assert Path(path).samefile(library) == (symbol.library == "nccl"), symbol.name


def test_the_host_engine_is_filled_whole(loader: Loader, tmp_path: Path) -> None:
    library = engines.build_host_engine(tmp_path)
    engine, why = loader.open(library, library)
    assert engine, why
    assert [s.name for s in our_symbols() if loader.symbol(engine, s.name) is None] == []


@pytest.mark.parametrize("symbol", OPTIONAL[::4], ids=lambda symbol: symbol.name)
def test_a_missing_optional_function_is_null(
    loader: Loader, hollow: Callable[..., Path], symbol: Symbol
) -> None:
    library = hollow(symbol.name)
    engine, why = loader.open(library, library)
    assert engine, why
    assert loader.symbol(engine, symbol.name) is None
    assert loader.path(engine, symbol.name) is None
    assert loader.symbol(engine, "ncclAllReduce") is not None
    if symbol.library == "nccl":
        assert loader.since(symbol.name) == symbol.since


@pytest.mark.parametrize(
    "name", [REQUIRED[0].name, "ncclGroupEnd", "cuInit", REQUIRED[-1].name]
)
def test_a_missing_required_function_is_named(
    loader: Loader, hollow: Callable[..., Path], name: str
) -> None:
    library = hollow(name)
    engine, why = loader.open(library, library)
    assert engine is None
    assert re.search(rf"\b{name}\b", why), why
    assert str(library) in why


@pytest.mark.parametrize("which", ["nccl", "cuda"])
def test_a_file_that_is_no_library_is_refused(
    loader: Loader, hollow: Callable[..., Path], tmp_path: Path, which: str
) -> None:
    good, bad = hollow(), tmp_path / "libtext.so"
    bad.write_text("not a library\n" * 20)
    engine, why = loader.open(bad, good) if which == "nccl" else loader.open(good, bad)
    assert engine is None
    assert str(bad) in why
    assert "ELF" in why  # the loader's own words, not ours


def test_a_file_that_is_not_there_is_named(
    loader: Loader, hollow: Callable[..., Path], tmp_path: Path
) -> None:
    engine, why = loader.open(tmp_path / "libnowhere.so", hollow())
    assert engine is None
    assert "libnowhere.so" in why


def test_two_engines_keep_their_own_functions(
    loader: Loader, hollow: Callable[..., Path]
) -> None:
    """One handle a library: what another engine, or the process, has loaded is never called."""
    first, second = hollow(), hollow()
    one, two = loader.open(first, first)[0], loader.open(second, second)[0]
    assert one
    assert two
    for name in ("ncclAllReduce", "cuEventQuery"):
        assert loader.symbol(one, name) != loader.symbol(two, name)
        assert loader.path(one, name) == str(first)
        assert loader.path(two, name) == str(second)


def test_an_engine_is_invisible_to_the_process(
    loader: Loader, hollow: Callable[..., Path]
) -> None:
    """RTLD_LOCAL: a library loaded later must not be bound to this one's functions."""
    library = hollow(OPTIONAL[0].name)
    mark = f"pn_not_{OPTIONAL[0].name}"
    assert loader.open(library, library)[0]
    assert not hasattr(ctypes.CDLL(None), mark)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # had the loader done so, it would be seen
    assert hasattr(ctypes.CDLL(None), mark)


def test_a_name_outside_the_list_is_none(loader: Loader, hollow: Callable[..., Path]) -> None:
    library = hollow()
    engine, _ = loader.open(library, library)
    assert loader.symbol(engine, "ncclNoSuchFunction") is None
    assert loader.since("ncclNoSuchFunction") == 0
