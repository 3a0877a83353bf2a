"""The host engine as a C library, for tests: ctypes prototypes made from src/abi.

A call through :class:`Engine` releases the GIL; ``hold_gil=True`` keeps it, to show what that
does to a driver whose host functions want it. Handles and pointers are plain integers,
out-parameters are ctypes objects.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # also in processes of a test's

from support.symbols import HostFunction as HostFunction
from support.symbols import UniqueId as UniqueId
from support.symbols import other_symbols, our_symbols, prototypes

from pynccl import _host
from pynccl._host import Call

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = "libpynccl_host.so"
FUNCTIONS = prototypes([*our_symbols(), *other_symbols()])

SUCCESS = 0
INVALID_VALUE = 1
NOT_INITIALIZED = 3
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
NOT_READY = 600
ILLEGAL_ADDRESS = 700
CONTEXT_IS_DESTROYED = 709
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901

NON_BLOCKING = 1
DISABLE_TIMING = 2
LEGACY = 1
PER_THREAD = 2


class DriverError(RuntimeError):
    """A CUDA function did not answer CUDA_SUCCESS; ``code`` is its CUresult."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function}: {name} ({code})")
        self.code = code


def library_path() -> Path:
    """Return where the engine lies: PYNCCL_HOST_LIBRARY, or inside the installed package."""
    if given := os.environ.get("PYNCCL_HOST_LIBRARY"):
        return Path(given)
    if package := importlib.util.find_spec("pynccl"):
        for folder in package.submodule_search_locations or ():
            if (path := Path(folder) / "_native" / LIBRARY).exists():
                return path
    message = f"no {LIBRARY}: install the package, or set PYNCCL_HOST_LIBRARY"
    raise FileNotFoundError(message)


class Engine:
    """The library: each function of the lists is an attribute that returns its result code."""

    def __init__(self, path: Path | None = None, *, hold_gil: bool = False) -> None:
        kind = ctypes.PyDLL if hold_gil else ctypes.CDLL
        self.library = _host.declare(kind(str(path or library_path())))

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(name)
        function = getattr(self.library, name)
        function.restype, function.argtypes = FUNCTIONS[name]
        setattr(self, name, function)
        return function

    def error_name(self, code: int) -> str:
        """Return the driver's name of a CUresult."""
        text = ctypes.c_char_p()
        self.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or b"?").decode()

    def must(self, name: str, *arguments: Any) -> None:
        """Call a CUDA function and raise DriverError unless it succeeds."""
        if code := getattr(self, name)(*arguments):
            raise DriverError(name, code, self.error_name(code))

    def made(self, name: str, *arguments: Any, kind: Any = ctypes.c_void_p) -> int:
        """Call a CUDA function and return what it wrote to its first, its out-parameter."""
        out = kind()
        self.must(name, ctypes.byref(out), *arguments)
        return int(out.value or 0)

    def set(self, key: str, value: str) -> None:
        """pn_host_set; ValueError where the engine refuses."""
        if self.library.pn_host_set(key.encode(), value.encode()):
            message = f"the host engine refuses {key}={value!r}"
            raise ValueError(message)

    def live(self) -> dict[str, int]:
        """Count the live objects of each kind."""
        return _host.live(self.library)

    def misuse(self) -> list[str]:
        """Take what the misuse detector has reported."""
        return _host.misuse(self.library)

    @contextmanager
    def journal(self, capacity: int = 1 << 16) -> Iterator[list[Call]]:
        """Record calls; the yielded list is filled when the block ends."""
        calls: list[Call] = []
        self.library.pn_host_journal_start(capacity)
        try:
            yield calls
        finally:
            self.library.pn_host_journal_stop()
            room = (Call * capacity)()
            calls.extend(room[: self.library.pn_host_journal_read(room, capacity)])

    def stream(self, flags: int = NON_BLOCKING) -> int:
        """Make a new stream of the current context."""
        return self.made("cuStreamCreateWithPriority", flags, 0)

    def event(self, flags: int = DISABLE_TIMING) -> int:
        """Make a new event of the current context."""
        return self.made("cuEventCreate", flags)

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory of the current context."""
        return self.made("cuMemAlloc_v2", nbytes, kind=ctypes.c_ulonglong)
