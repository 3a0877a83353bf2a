"""The lists of functions in src/abi, read once for all tests, and as ctypes prototypes.

Handles and pointers are plain integers, out-parameters are ctypes objects.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ABI = Path(__file__).resolve().parents[2] / "src" / "abi"

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Team(ctypes.Structure):
    """ncclTeam_t, which is passed and returned by value."""

    _fields_ = (("nRanks", ctypes.c_int), ("rank", ctypes.c_int), ("stride", ctypes.c_int))


class MultimemHandle(ctypes.Structure):
    """ncclMultimemHandle_t, which is passed by value."""

    _fields_ = (("mcBasePtr", ctypes.c_void_p),)


@dataclass(frozen=True)
class Symbol:
    """One line of symbols.h or rest.h. `since` is 23200 for NCCL 2.32, 12000 for CUDA 12.0."""

    name: str
    library: str
    required: bool
    since: int
    result: str
    parameters: tuple[str, ...]


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)


def read_symbols(text: str) -> list[Symbol]:
    """The lines of a list of functions. ValueError where what looks like one is not read."""
    text = without_comments(text)
    symbols = [
        Symbol(
            name,
            library.lower(),
            need == "REQUIRED",
            int(major) * 10000 + int(minor) * 100 + int(patch or 0)
            if library == "NCCL"
            else int(major) * 1000 + int(minor) * 10,
            result.strip(),
            () if parameters == "void" else tuple(parameters.split(", ")),
        )
        for need, library, major, minor, patch, result, name, parameters in re.findall(
            r"X\((REQUIRED|OPTIONAL), (NCCL|CUDA)_SINCE\((\d+), (\d+)(?:, (\d+))?\), "
            r"([\w *]+), (\w+), \(([^()]*)\)\)",
            text,
        )
    ]
    lines = len(re.findall(r"^\s*X\(", text, flags=re.M))
    if lines != len(symbols):
        raise ValueError(f"the list has {lines} lines, of which {len(symbols)} could be read")
    return symbols


def our_symbols() -> list[Symbol]:
    """The functions that pynccl calls."""
    return read_symbols((ABI / "symbols.h").read_text("utf-8"))


def other_symbols() -> list[Symbol]:
    """The functions that the host engine has for other programs."""
    return read_symbols((ABI / "rest.h").read_text("utf-8"))


_BY_VALUE: dict[str, Any] = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "unsigned char": ctypes.c_ubyte,
    "unsigned short": ctypes.c_ushort,
    "unsigned long long": ctypes.c_ulonglong,
    "size_t": ctypes.c_size_t,
    "cuuint32_t": ctypes.c_uint32,
    "cuuint64_t": ctypes.c_uint64,
    "CUdevice": ctypes.c_int,
    "CUdeviceptr": ctypes.c_ulonglong,
    "CUhostFn": HostFunction,
    "ncclUniqueId": UniqueId,
    "ncclTeam_t": Team,
    "ncclMultimemHandle_t": MultimemHandle,
    "CUcontext": ctypes.c_void_p,
    "CUstream": ctypes.c_void_p,
    "CUevent": ctypes.c_void_p,
    "CUgraph": ctypes.c_void_p,
    "CUgraphExec": ctypes.c_void_p,
    "CUmemoryPool": ctypes.c_void_p,
    "cudaStream_t": ctypes.c_void_p,
    "ncclComm_t": ctypes.c_void_p,
    "ncclWindow_t": ctypes.c_void_p,
    "ncclParamHandle_t": ctypes.c_void_p,
}


def ctype(declaration: str) -> Any:
    """The ctypes type of one C parameter, or of a result; an enumeration is an int."""
    if declaration == "void":
        return None
    if "*" in declaration:
        return ctypes.c_void_p
    words = declaration.replace("const ", "").split()
    for name in (" ".join(words), " ".join(words[:-1])):  # a parameter ends in its name
        if name in _BY_VALUE:
            return _BY_VALUE[name]
    return ctypes.c_int


def prototypes(symbols: Iterable[Symbol]) -> dict[str, tuple[Any, list[Any]]]:
    """Result and argument types of functions, by name."""
    return {
        symbol.name: (
            ctypes.c_char_p if "char *" in symbol.result else ctype(symbol.result),
            [ctype(parameter) for parameter in symbol.parameters],
        )
        for symbol in symbols
    }
