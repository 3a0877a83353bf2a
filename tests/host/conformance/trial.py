"""A rule at work: its calls, what they returned, and the memory that they point at."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from typing import TYPE_CHECKING, Any

from hostlib import FUNCTIONS, UniqueId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SUCCESS, CUDA, SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE, IN_PROGRESS, TIMEOUT = range(9)
INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = range(10)
FLOAT8E4M3, FLOAT8E5M2 = 10, 11
SUM, PROD, MAX, MIN, AVG = range(5)
NOT_READY = 600
NON_BLOCKING = 1
ANY: tuple[int, ...] = ()


class Library:
    """The functions of NCCL and of the driver, from one shared object or from two."""

    def __init__(self, nccl: str, cuda: str | None = None) -> None:
        self.nccl = ctypes.CDLL(nccl)
        self.cuda = ctypes.CDLL(cuda) if cuda else self.nccl
        self.is_host = hasattr(self.nccl, "pn_host_set")

    def function(self, name: str) -> Any:
        """The function of this name, typed; AttributeError where the library has none."""
        function = getattr(self.nccl if name.startswith("nccl") else self.cuda, name)
        function.restype, function.argtypes = FUNCTIONS[name]
        return function

    def set(self, key: str, value: str) -> None:
        """A setting of the host engine."""
        if self.nccl.pn_host_set(key.encode(), value.encode()):
            raise ValueError(f"the host engine refuses {key}={value!r}")

    def last_error(self) -> str:
        text: bytes | None = self.function("ncclGetLastError")(None)
        return (text or b"").decode(errors="replace")


class Trial:
    """Makes calls, and keeps what was wrong with their results."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.seen: list[object] = []
        self.complaints: list[str] = []
        self._kept: list[Any] = []

    # ---- calls

    def call(self, name: str, *arguments: Any, gives: int | Sequence[int] = SUCCESS) -> int:
        """Call a function; a result that is not one of `gives` is a complaint."""
        result: int = self.library.function(name)(*arguments)
        allowed = (gives,) if isinstance(gives, int) else tuple(gives)
        self.seen.append([name, result])
        if allowed and result not in allowed:
            detail = self.library.last_error() if result else ""
            self.complaints.append(f"{name} gave {result}, not {gives}. {detail}".rstrip(" ."))
        return result

    def same(self, what: str, value: Any, wanted: Any) -> None:
        """A value that is not the wanted one is a complaint."""
        self.seen.append([what, value if isinstance(value, int | str | None) else repr(value)])
        if value != wanted:
            self.complaints.append(f"{what} is {value!r}, not {wanted!r}")

    def clean(self) -> None:
        """No group is open on this thread."""
        self.call("ncclGroupEnd", gives=USAGE)

    # ---- memory

    def keep(self, memory: Any) -> Any:
        """Keep ctypes memory alive until the rule has ended."""
        self._kept.append(memory)
        return memory

    def pointer(self, value: int | None = None) -> ctypes.c_void_p:
        """A pointer-sized output."""
        return self.keep(ctypes.c_void_p(value))

    def number(self, value: int = -7) -> ctypes.c_int:
        """An int output."""
        return self.keep(ctypes.c_int(value))

    def bytes(self, size: int = 4096, start: bytes = b"") -> Any:
        """Ordinary memory that begins with these bytes."""
        return self.keep(ctypes.create_string_buffer(start, max(size, len(start))))

    def together(self, *bodies: Callable[[int], None]) -> None:
        """Run functions at the same time, each with its number, and wait for all."""
        threads = [
            threading.Thread(target=body, args=(number,), daemon=True)
            for number, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def unique_id(self) -> UniqueId:
        made = self.keep(UniqueId())
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return made


class Rank(Trial):
    """A rank: a thread with a device of its own, a communicator and a stream."""

    def __init__(self, library: Library, rank: int, ranks: int) -> None:
        super().__init__(library)
        self.rank, self.ranks = rank, ranks
        self.comm = self.pointer()
        self.stream = self.pointer()

    def begin(self, unique: UniqueId, config: Any) -> None:
        name = "ncclCommInitRank" if config is None else "ncclCommInitRankConfig"
        more = () if config is None else (config,)
        self.call(name, ctypes.byref(self.comm), self.ranks, unique, self.rank, *more)

    def end(self) -> None:
        """Finalize and destroy what is left."""
        if self.comm.value:
            self.call("ncclCommFinalize", self.comm)
            self.call("ncclCommDestroy", self.comm)
            self.comm.value = None

    def abort(self) -> None:
        self.call("ncclCommAbort", self.comm)
        self.comm.value = None

    def memory(self, nbytes: int, start: bytes = b"", registered: bool = False) -> Device:
        return Device(self, nbytes, start, registered)

    def synchronize(self, gives: int = SUCCESS) -> None:
        self.call("cuStreamSynchronize", self.stream, gives=gives)

    def all_reduce(
        self, send: Any, recv: Any, count: int, dtype: int = INT32, op: int = SUM,
        gives: int | Sequence[int] = SUCCESS,
    ) -> int:  # fmt: skip
        return self.call(
            "ncclAllReduce", send, recv, count, dtype, op, self.comm, self.stream, gives=gives
        )

    def async_error(self) -> int:
        state = self.number()
        self.call("ncclCommGetAsyncError", self.comm, ctypes.byref(state))
        return state.value

    def wait_for_error(self, limit_s: float = 5.0) -> int:
        """The asynchronous error, once there is one or the time has passed."""
        end = time.monotonic() + limit_s
        state = self.number()
        poll = self.library.function("ncclCommGetAsyncError")
        while time.monotonic() < end and poll(self.comm, ctypes.byref(state)) == 0:
            if state.value:
                break
            self.library.function("cuStreamQuery")(self.stream)
            time.sleep(0.002)
        return state.value


class Device:
    """Device memory of a rank, read and written through the driver."""

    def __init__(self, rank: Rank, nbytes: int, start: bytes, registered: bool) -> None:
        self.rank = rank
        self.nbytes = nbytes
        self.registered = registered
        out: Any = ctypes.c_void_p() if registered else ctypes.c_ulonglong()
        rank.call("ncclMemAlloc" if registered else "cuMemAlloc_v2", ctypes.byref(out), nbytes)
        self.address: int = out.value or 0
        self.write(start.ljust(nbytes, b"\0"))

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.address)

    def write(self, data: bytes, offset: int = 0) -> None:
        source = self.rank.bytes(len(data), data)
        self.rank.call(
            "cuMemcpyHtoDAsync_v2", self.address + offset, source, len(data), self.rank.stream
        )
        self.rank.synchronize()

    def read(self) -> bytes:
        into = self.rank.bytes(self.nbytes)
        self.rank.call(
            "cuMemcpyDtoHAsync_v2", into, self.address, self.nbytes, self.rank.stream
        )
        self.rank.synchronize()
        return into.raw[: self.nbytes]

    def free(self) -> None:
        if self.registered:
            self.rank.call("ncclMemFree", self)
        else:
            self.rank.call("cuMemFree_v2", self.address)


@contextlib.contextmanager
def current_device(trial: Trial, device: int) -> Iterator[None]:
    """Make a device's primary context the thread's."""
    context = trial.pointer()
    trial.call("cuInit", 0)
    trial.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    trial.call("cuCtxSetCurrent", context)
    try:
        yield
    finally:
        trial.call("cuCtxSetCurrent", None)
        trial.call("cuDevicePrimaryCtxRelease_v2", device)


def with_ranks(
    trial: Trial, ranks: int, body: Callable[[Rank], None], config: Any = None
) -> None:
    """Run the body on so many ranks, a thread and a device each, with communicators made.

    A communicator that the body leaves is finalized and destroyed after it.
    """
    unique = trial.unique_id()
    made = [Rank(trial.library, number, ranks) for number in range(ranks)]

    def one(rank: Rank) -> None:
        try:
            with current_device(rank, rank.rank):
                rank.call(
                    "cuStreamCreateWithPriority", ctypes.byref(rank.stream), NON_BLOCKING, 0
                )
                rank.begin(unique, config)
                if rank.comm.value:
                    body(rank)
                    rank.end()
                rank.call("cuStreamDestroy_v2", rank.stream)
        except Exception as error:
            rank.complaints.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in made:
        trial.seen += rank.seen
        trial.complaints += [f"rank {rank.rank}: {text}" for text in rank.complaints]
