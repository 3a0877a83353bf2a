"""The host engine as a C library, for tests: ctypes prototypes made from src/abi.

A call through :class:`Engine` releases the GIL; ``hold_gil=True`` keeps it, to show what that
does to a driver whose host functions want it. Handles and pointers are plain integers,
out-parameters are ctypes objects.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ABI = Path(__file__).resolve().parents[2] / "src" / "abi"
LISTS = ("symbols.h", "rest.h")
LIBRARY = "libpynccl_host.so"

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

NON_BLOCKING = 1
DISABLE_TIMING = 2
LEGACY = 1
PER_THREAD = 2

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Call(ctypes.Structure):
    """host_call_t: one exported call as the journal has it."""

    _fields_ = (
        ("time_ns", ctypes.c_uint64),
        ("thread", ctypes.c_uint64),
        ("function", ctypes.c_char * 32),
        ("device", ctypes.c_int32),
        ("group_depth", ctypes.c_int32),
        ("result", ctypes.c_int32),
        ("datatype", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("count", ctypes.c_uint64),
        ("comm", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("object", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


LIVE = (
    "streams",
    "events",
    "communicators",
    "segments",
    "threads",
    "allocations",
    "work_items",
    "groups_open",
)


class Live(ctypes.Structure):
    """host_live_t: how many objects of each kind are alive."""

    _fields_ = tuple((name, ctypes.c_int64) for name in LIVE)


class DriverError(RuntimeError):
    """A CUDA function did not answer CUDA_SUCCESS; ``code`` is its CUresult."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function}: {name} ({code})")
        self.code = code


_BY_VALUE: dict[str, Any] = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "unsigned char": ctypes.c_ubyte,
    "unsigned long long": ctypes.c_ulonglong,
    "size_t": ctypes.c_size_t,
    "cuuint32_t": ctypes.c_uint32,
    "CUdevice": ctypes.c_int,
    "CUdeviceptr": ctypes.c_ulonglong,
    "CUhostFn": HostFunction,
    "ncclUniqueId": UniqueId,
}
_HANDLES = (
    "CUcontext",
    "CUstream",
    "CUevent",
    "CUgraph",
    "CUgraphExec",
    "cudaStream_t",
    "ncclComm_t",
    "ncclWindow_t",
    "ncclParamHandle_t",
)
_SYMBOL = re.compile(r"^\s*X\((?:REQUIRED|OPTIONAL), \w+\([\d, ]+\), (.+?), (\w+), \((.*)\)\)")


def _ctype(declaration: str) -> Any:
    """Find the ctypes type of one C parameter, or of a result; an enumeration is an int."""
    if "*" in declaration:
        return ctypes.c_void_p
    words = declaration.replace("const ", "").split()
    for name in (" ".join(words), " ".join(words[:-1])):  # a parameter ends in its name
        if name in _BY_VALUE:
            return _BY_VALUE[name]
        if name in _HANDLES:
            return ctypes.c_void_p
    return ctypes.c_int


def prototypes() -> dict[str, tuple[Any, list[Any]]]:
    """Read the result and argument types of every function in symbols.h and rest.h."""
    found = {}
    text = "".join((ABI / name).read_text(encoding="ascii") for name in LISTS)
    for line in text.splitlines():
        if match := _SYMBOL.match(line):
            result, name, parameters = match.groups()
            takes = [_ctype(p) for p in parameters.split(", ") if p != "void"]
            gives = ctypes.c_char_p if "char *" in result else _ctype(result)
            found[name] = (gives, takes)
    return found


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
        self.library = kind(str(path or library_path()))
        self._prototypes = prototypes()
        self.library.pn_host_set.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
        self.library.pn_host_journal_start.argtypes = (ctypes.c_size_t,)
        self.library.pn_host_journal_read.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.library.pn_host_journal_read.restype = ctypes.c_size_t
        self.library.pn_host_live.argtypes = (ctypes.c_void_p,)
        self.library.pn_host_hold_driver_lock.argtypes = (ctypes.c_uint,)

    def __getattr__(self, name: str) -> Any:
        if name not in self._prototypes:
            raise AttributeError(name)
        function = getattr(self.library, name)
        function.restype, function.argtypes = self._prototypes[name]
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
        live = Live()
        self.library.pn_host_live(ctypes.byref(live))
        return {name: getattr(live, name) for name in LIVE}

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
