"""Test doubles: the host engine's faults, journal, tempers and counters.

Everything here works on the host engine of this process and has no effect on NCCL or on a GPU.
Processes that are started later are reached by the environment instead:
``PYNCCL_HOST_FAULTS``, ``PYNCCL_HOST_TEMPER`` and the like.

::

    with faults("op:delay=100ms,name=ncclAllReduce"):
        work = comm.all_reduce(x)
        assert not work.done()

A rule is ``site:kind[=value][,filter ...]``; rules are separated by ``;``. Of those that match
a call the first whose turn it is strikes.

======  ====================================================================================
site    ``init``, ``op`` (a kernel on its stream), ``call`` (any NCCL or driver function),
        ``finalize``, ``destroy``, ``abort``, ``event``, ``host_function``
kind    ``delay=TIME``, ``fail=CODE``, ``stuck[=TIME]`` (until aborted), ``kill`` (this
        process), ``remote=CODE`` (the asynchronous error), ``cuda_error=CODE`` (sticky),
        ``in_progress=POLLS``, ``skip`` (a host function), ``affinity`` (as some releases of
        NCCL leave it)
filter  ``name=ncclAllReduce``, ``rank=N``, ``call=K`` (from the k-th on), ``times=N``,
        ``every=N``, ``probability=P``
TIME    ``200us``, ``100ms``, ``1.5s``
======  ====================================================================================
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pynccl import _engines, _host
from pynccl.errors import ConfigError, UsageError

__all__ = [
    "Call",
    "Journal",
    "faults",
    "hold_driver_lock",
    "journal",
    "live",
    "misuse",
    "settings",
    "temper",
]

# Every setting, the variable that the engine reads at its start, and the value without one.
_SETTINGS = {
    "mode": ("PYNCCL_HOST_MODE", "strict"),
    "temper": ("PYNCCL_HOST_TEMPER", "quick"),
    "misuse": ("PYNCCL_HOST_MISUSE", "ignore"),
    "devices": ("PYNCCL_HOST_DEVICES", "8"),
    "nccl_version": ("PYNCCL_HOST_NCCL_VERSION", "2.32.3"),
    "quirks": ("PYNCCL_HOST_QUIRKS", ""),
    "pointers": ("PYNCCL_HOST_POINTERS", "any"),
    "launch_cost_us": ("PYNCCL_HOST_LAUNCH_COST_US", ""),
    "launch_depth": ("PYNCCL_HOST_LAUNCH_DEPTH", ""),
    "read_delay_us": ("PYNCCL_HOST_READ_DELAY_US", ""),
    "way": ("PYNCCL_HOST_WAY", "measured"),
    "seed": ("PYNCCL_HOST_SEED", "1"),
    "faults": ("PYNCCL_HOST_FAULTS", ""),
    "multi_rank": ("NCCL_MULTI_RANK_GPU_ENABLE", "0"),
    "windows": ("NCCL_WIN_ENABLE", "1"),
    "runtime_connect": ("NCCL_RUNTIME_CONNECT", "1"),
    "launch_blocking": ("CUDA_LAUNCH_BLOCKING", "0"),
}
_in_force: dict[str, str] = {}
_recording = False


def _library() -> ctypes.CDLL:
    """The very object that the host engine runs on; opened now, if nobody has used it."""
    path = _engines.engine("host").path("ncclGetVersion")
    assert path is not None  # a required function: an engine without it does not open
    return _host.declare(ctypes.CDLL(path))


# ---- settings --------------------------------------------------------------------------------


@contextlib.contextmanager
def settings(**values: str | int) -> Iterator[None]:
    """Change settings of the host engine for the length of the block.

    Args:
        **values: ``mode="faithful"``, ``temper="gpulike"``, ``quirks="depth-leak"``,
            ``misuse="report"`` or ``"abort"`` (the process), see `misuse`,
            ``pointers="own"``, ``launch_cost_us=20``, ``launch_depth=4``,
            ``read_delay_us=500``, ``way="past"``, ``launch_blocking=1``, ``runtime_connect=0``,
            ``multi_rank=1``, ``seed=7``, ``faults="..."``, ``nccl_version="2.21.5"`` (what came
            later is refused, but was found before). ``devices`` can be set only before
            the first device is used.

    Raises:
        ConfigError: there is no such setting, or the engine does not understand the value;
            nothing is changed.
    """
    library = _library()
    before: dict[str, str] = {}
    try:
        for key, value in values.items():
            if key not in _SETTINGS:
                raise ConfigError(
                    f"the host engine has no setting {key!r}; it has {', '.join(_SETTINGS)}"
                )
            variable, default = _SETTINGS[key]
            previous = _in_force.get(key, os.environ.get(variable) or default)
            if library.pn_host_set(key.encode(), str(value).encode()):
                raise ConfigError(f"the host engine refuses {key}={value!r}")
            before[key] = previous
            _in_force[key] = str(value)
        yield
    finally:
        for key, previous in reversed(before.items()):
            library.pn_host_set(key.encode(), previous.encode())
            _in_force[key] = previous


def temper(name: str) -> contextlib.AbstractContextManager[None]:
    """Give the host engine a temper for the length of the block.

    Args:
        name: ``"quick"``, or ``"gpulike"``: with a GPU's launch cost and depth, blocking first
            contacts, delayed reads and pure event queries. Change it while nothing is pending.
    """
    return settings(temper=name)


def faults(rules: str | Iterable[str]) -> contextlib.AbstractContextManager[None]:
    """Inject faults for the length of the block; the module's docstring has the grammar.

    The end of the block also frees whatever a rule has stuck in a call; a kernel that is stuck
    stays so until its communicator is aborted.

    Args:
        rules: one string, or several that are joined; they replace the rules in force.

    Raises:
        ConfigError: a rule is not understood, or could never strike.
    """
    return settings(faults=rules if isinstance(rules, str) else ";".join(rules))


# ---- the journal -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of an exported function of the host engine.

    Attributes:
        function: its name, such as ``"ncclAllReduce"``; at most 31 letters of it.
        time_ns: when it ended, on the monotonic clock.
        thread: the kernel's number of the calling thread.
        device: the thread's current device, -1 for none.
        group_depth: how deep in ``ncclGroupStart`` the thread was.
        result: its ``ncclResult_t`` or ``CUresult``.
        datatype, op, root: as passed, -1 where the call has none.
        rank: the communicator's, -1 where the call has none.
        count: elements, as passed.
        comm, stream, object: handles.
    """

    function: str
    time_ns: int
    thread: int
    device: int
    group_depth: int
    result: int
    datatype: int
    op: int
    root: int
    rank: int
    count: int
    comm: int
    stream: int
    object: int


class Journal:
    """The calls of a ``with journal()`` block: read while it runs, or afterwards."""

    def __init__(self, library: ctypes.CDLL, capacity: int) -> None:
        self._library = library
        self._capacity = capacity
        self._kept: list[Call] | None = None

    @property
    def calls(self) -> list[Call]:
        """What has been recorded so far, in the order of the calls' ends."""
        return list(self._read() if self._kept is None else self._kept)

    def named(self, *functions: str) -> list[Call]:
        """The calls of the given functions, such as ``"ncclSend"``."""
        wanted = {function[: _host.NAME_BYTES] for function in functions}
        return [call for call in self.calls if call.function in wanted]

    def nccl(self) -> list[str]:
        """The names of the NCCL calls, without those that only ask for a state or a text."""
        asking = ("ncclCommGetAsyncError", "ncclGetLastError", "ncclGetErrorString")
        return [
            call.function
            for call in self.calls
            if call.function.startswith("nccl") and call.function not in asking
        ]

    def _read(self) -> list[Call]:
        room = (_host.Call * self._capacity)()
        length = int(self._library.pn_host_journal_read(room, self._capacity))
        return [_call_from(room[i]) for i in range(length)]

    def _keep(self) -> None:
        self._kept = self._read()


def _call_from(raw: _host.Call) -> Call:
    numbers = {name: getattr(raw, name) for name in Call.__annotations__ if name != "function"}
    return Call(function=raw.function.decode(), **numbers)


@contextlib.contextmanager
def journal(capacity: int = 1 << 16) -> Iterator[Journal]:
    """Record every call that this process makes to the host engine, on any thread.

    Args:
        capacity: how many calls at most; later ones are not recorded.

    Raises:
        UsageError: a journal is being kept already; there is one for the process.
    """
    global _recording
    if _recording:
        raise UsageError("a journal of the host engine is being kept already")
    library = _library()
    library.pn_host_journal_start(capacity)
    _recording = True
    kept = Journal(library, capacity)
    try:
        yield kept
    finally:
        library.pn_host_journal_stop()
        _recording = False
        kept._keep()


# ---- counters, and a busy driver -------------------------------------------------------------


def live() -> dict[str, int]:
    """How many objects of each kind the host engine holds now.

    ``pynccl.diagnostics()`` counts what the binding holds; a leak shows in one of the two.
    """
    return _host.live(_library())


def misuse() -> list[str]:
    """What the host engine has noticed since the last call and NCCL or CUDA would let pass.

    Two threads in one communicator, a communicator used or destroyed after its end, an
    operation while another device than the communicator's is current, a thread that ends
    inside a group. It looks under ``settings(misuse="report")`` or ``PYNCCL_HOST_MISUSE``.

    Returns:
        One sentence each; of many, the first 16 and how many more there were.
    """
    return _host.misuse(_library())


def hold_driver_lock(seconds: float) -> None:
    """Hold the driver's lock on another thread for a while, as a driver busy elsewhere does.

    Returns when the lock is held. Until it is free again every call to the driver waits.

    Args:
        seconds: for how long.
    """
    _library().pn_host_hold_driver_lock(round(seconds * 1000))
