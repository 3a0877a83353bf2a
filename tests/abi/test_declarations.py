"""src/abi says what the vendors' own headers say: values, layouts, types and prototypes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import comparison
import pytest
import toolchain
from comparison import Side
from declarations import our_header, read_header
from support.symbols import ABI, other_symbols, our_symbols, read_symbols

LISTED = [*our_symbols(), *other_symbols()]


def test_nccl_header_agrees(nccl_side: Side, our_side: Side, tmp_path: Path) -> None:
    assert comparison.differences(our_header("nccl_abi.h"), our_side, nccl_side, tmp_path) == []


def test_cuda_header_agrees(cuda_side: Side, our_side: Side, tmp_path: Path) -> None:
    assert comparison.differences(our_header("cuda_abi.h"), our_side, cuda_side, tmp_path) == []


def test_dlpack_header_agrees(dlpack_side: Side, our_side: Side, tmp_path: Path) -> None:
    assert (
        comparison.differences(our_header("dlpack_abi.h"), our_side, dlpack_side, tmp_path)
        == []
    )


def test_prototypes_agree(nccl_side: Side, tmp_path: Path) -> None:
    # Over the stand-ins this checks NCCL's functions, over the toolkit the driver's too.
    assert comparison.prototype_complaint(nccl_side, ABI, tmp_path) == ""


def test_nccl_declares_every_symbol(nccl_side: Side, tmp_path: Path) -> None:
    symbols = [symbol for symbol in LISTED if symbol.library == "nccl"]
    assert comparison.undeclared(nccl_side, symbols, tmp_path) == ""


def test_cuda_declares_every_symbol(cuda_side: Side, tmp_path: Path) -> None:
    symbols = [symbol for symbol in LISTED if symbol.library == "cuda"]
    assert comparison.undeclared(cuda_side, symbols, tmp_path) == ""


def test_driver_functions_are_as_old_as_we_say(cuda_side: Side) -> None:
    """cudaTypedefs.h names a type after the release that brought each version of a function."""
    path = next(
        folder / "cudaTypedefs.h"
        for folder in cuda_side.folders
        if (folder / "cuda.h").is_file()
    )
    releases: dict[str, int] = {}
    for name, release in re.findall(
        r"\bPFN_(cu\w+?)_v(\d+)(?:_ptsz)?\b", path.read_text("utf-8")
    ):
        releases[name] = min(int(release), releases.get(name, 1 << 30))
    for symbol in LISTED:
        if symbol.library == "cuda":
            assert releases[re.sub(r"_v\d+$", "", symbol.name)] <= symbol.since, symbol.name


def test_symbols_are_listed_once() -> None:
    names = [symbol.name for symbol in LISTED]
    assert len(set(names)) == len(names)


def test_what_others_call_is_never_required() -> None:
    assert [symbol.name for symbol in other_symbols() if symbol.required] == []


def test_what_nccl_2_18_had_is_required() -> None:
    """2.18 is the oldest library that is taken: only what it has can be REQUIRED."""
    wrong = [
        s.name
        for s in our_symbols()
        if s.library == "nccl" and s.required != (s.since <= 21800)
    ]
    assert wrong == []


# ---- the guards can fail ---------------------------------------------------------------------


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A copy of src/abi, in which a test plants a fault."""
    return Path(shutil.copytree(ABI, tmp_path / "abi"))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert text.count(old) == 1, f"{old!r} is not in {path.name} exactly once"
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(const ncclComm_t comm, int *count)", "(const ncclComm_t comm, long *count)"),
        ("ncclBcast, (void *buff, size_t count,", "ncclBcast, (void *buff, int count,"),
        ("const char *, ncclGetLastError", "char *, ncclGetLastError"),
    ],
)
def test_a_wrong_prototype_is_caught(
    nccl_side: Side, planted: Path, tmp_path: Path, old: str, new: str
) -> None:
    replace(planted / "symbols.h", old, new)
    assert "conflicting types" in comparison.prototype_complaint(nccl_side, planted, tmp_path)


def test_an_invented_function_is_caught(nccl_side: Side, planted: Path, tmp_path: Path) -> None:
    replace(planted / "symbols.h", " ncclBcast,", " ncclBroadcastInto,")
    symbols = [
        s
        for s in read_symbols((planted / "symbols.h").read_text("utf-8"))
        if s.library == "nccl"
    ]
    assert "ncclBroadcastInto" in comparison.undeclared(nccl_side, symbols, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("ncclRemoteError = 6", "ncclRemoteError = 16", "ncclRemoteError: ours 16, vendor 6"),
        ("NCCL_WIN_COLL_SYMMETRIC 0x01", "NCCL_WIN_COLL_SYMMETRIC 0x04", "ours 4, vendor 1"),
        ("    int nvlsHostMode;\n", "", "sizeof ncclConfig_t: ours 112, vendor 120"),
        ("float estimatedTime", "int estimatedTime", "estimatedTime is not: int"),
        ("ncclWindow_vidmem *ncclWindow_t", "ncclWindow *ncclWindow_t", "ncclWindow_t"),
    ],
)
def test_a_wrong_declaration_is_caught(
    nccl_side: Side, planted: Path, tmp_path: Path, old: str, new: str, named: str
) -> None:
    replace(planted / "nccl_abi.h", old, new)
    header = read_header((planted / "nccl_abi.h").read_text("utf-8"))
    ours = Side('#include "nccl_abi.h"', (planted,))
    assert named in "\n".join(comparison.differences(header, ours, nccl_side, tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "typedef union { int a; } Mixed;",
        "typedef enum { A, B = 2 } Half;",
        "typedef struct { int a, b; } Pair;",
        "typedef int Last",
    ],
)
def test_a_declaration_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_header(text)


def test_a_symbol_line_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="1 lines, of which 0"):
        read_symbols("  X(PERHAPS, NCCL_SINCE(2, 18), int, ncclSome, (void)) \\\n")


def test_the_reader_sees_the_whole_of_our_headers() -> None:
    """Counted by the compiler's own preprocessor-free words, so that a silent gap shows."""
    for name in ("nccl_abi.h", "cuda_abi.h", "dlpack_abi.h"):
        text = (ABI / name).read_text("utf-8")
        header = our_header(name)
        enums = len(re.findall(r"\btypedef enum\b", text))
        read = len(header.structs) + len(header.aliases) + enums
        assert read == len(re.findall(r"^typedef\b", text, flags=re.M)), name


# ---- where headers are looked for ------------------------------------------------------------


def test_cuda_home_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert toolchain.cuda_header_folders() == (tmp_path / "include",)
