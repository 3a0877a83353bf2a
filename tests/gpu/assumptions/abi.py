"""An engine's two libraries by ctypes, with the prototypes that src/abi/symbols.h gives.

Every function of that list is an attribute of :class:`Api` which returns its result code and
releases the GIL while it runs. Handles and pointers are plain integers, out-parameters are
ctypes objects.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # also where it runs as a command

from support.symbols import UniqueId as UniqueId
from support.symbols import our_symbols, prototypes

FUNCTIONS = prototypes(our_symbols())

SUCCESS = 0
NOT_READY = 600
NOT_SUPPORTED = 801
NON_BLOCKING = 1
DISABLE_TIMING = 2
GREATER_OR_EQUAL = 0
PORTABLE_AND_MAPPED = 1 | 2
CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED = range(3)
FLOAT32, SUM = 7, 0


class NotTried(Exception):
    """The engine or the machine lacks what the question is about; the text says what."""


class CallError(RuntimeError):
    """A function of a library did not answer with success; ``code`` is its answer."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function}: {text} ({code})")
        self.function = function
        self.code = code


def libraries(engine: str) -> tuple[str, str]:
    """Where pynccl itself finds an engine's NCCL and CUDA functions: two files, or one twice.

    Raises:
        pynccl.NotSupportedError: they are not there.
    """
    from pynccl import _engines

    opened = _engines.engine(engine)
    nccl, cuda = opened.path("ncclGetVersion"), opened.path("cuInit")
    if nccl is None or cuda is None:
        raise NotTried(f"the {engine} engine does not say where its functions come from")
    return nccl, cuda


class Api:
    """The functions of one engine."""

    def __init__(self, nccl: str, cuda: str) -> None:
        self.paths = (nccl, cuda)
        self._nccl = ctypes.CDLL(nccl)
        self._cuda = ctypes.CDLL(cuda)

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(name)
        library = self._nccl if name.startswith("nccl") else self._cuda
        try:
            function = getattr(library, name)
        except AttributeError:
            raise NotTried(f"this library has no {name}") from None
        function.restype, function.argtypes = FUNCTIONS[name]
        setattr(self, name, function)
        return function

    def error(self, name: str, code: int) -> CallError:
        """What a function's answer means, in the library's own words."""
        if name.startswith("nccl"):
            text = self.ncclGetErrorString(code).decode(errors="replace")
            detail = (self.ncclGetLastError(None) or b"").decode(errors="replace").strip()
            return CallError(name, code, f"{text}: {detail}" if detail else text)
        word = ctypes.c_char_p()
        self.cuGetErrorName(code, ctypes.byref(word))
        return CallError(name, code, (word.value or b"unknown error").decode())

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises CallError unless it answers with success."""
        if code := getattr(self, name)(*arguments):
            raise self.error(name, code)

    def made(self, name: str, *arguments: Any, kind: Any = ctypes.c_void_p) -> int:
        """Call a function whose first argument is where its product goes; give the product."""
        out = kind()
        self.call(name, ctypes.byref(out), *arguments)
        return int(out.value or 0)
