"""What a case works with: one rank's engine, device, communicator, streams and memory.

Nothing is freed: a case has a process of its own, which ends without clean-up, since a clean-up
could hang on what the case has broken on purpose.
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import abi
from .abi import Api, CallError, NotTried, UniqueId
from .board import Board
from .notes import Notebook

PAGE = 4096
SLOT = 64
DEVICE = 0


class Word:
    """A word of pinned host memory that streams can wait for and write, 0 at first."""

    def __init__(self, host: int, device: int) -> None:
        self.device = device
        self._host = ctypes.c_uint32.from_address(host)
        self._host.value = 0

    def store(self, value: int) -> None:
        """Write it from the host, with a plain aligned store."""
        self._host.value = value

    def load(self) -> int:
        """Read it from the host."""
        return self._host.value


@dataclass
class Shared:
    """What the ranks of one process have in common."""

    ranks: int
    issue: threading.Lock = field(default_factory=threading.Lock)
    """Held while a rank launches on the device, where calls cannot wait for peers."""


class Stage:
    """One rank of a case."""

    def __init__(
        self, engine: str, api: Api, board: Board, notebook: Notebook, shared: Shared
    ) -> None:
        self.engine = engine
        self.api = api
        self.board = board
        self.rank = board.rank
        self.ranks = board.ranks
        self.notebook = notebook
        self.shared = shared
        self._page = 0
        self._used = PAGE
        api.call("cuInit", 0)
        self.context = api.made("cuDevicePrimaryCtxRetain", DEVICE)
        self.enter()

    def enter(self) -> None:
        """Make the device's context the calling thread's."""
        self.api.call("cuCtxSetCurrent", self.context)

    def stream(self) -> int:
        """Make a non-blocking stream."""
        return self.api.made("cuStreamCreateWithPriority", abi.NON_BLOCKING, 0)

    def event(self) -> int:
        """Make an event without timing."""
        return self.api.made("cuEventCreate", abi.DISABLE_TIMING)

    def mark(self, stream: int) -> int:
        """Record a new event on a stream."""
        event = self.event()
        self.api.call("cuEventRecord", event, stream)
        return event

    def finish(self, stream: int) -> None:
        """Wait for all that is on a stream."""
        self.api.call("cuStreamSynchronize", stream)

    def settle(self, event: int, seconds: float) -> tuple[int, float]:
        """Poll an event until it is no longer pending: its status, and how long it took.

        The status is still "not ready" when the time has passed.
        """
        start = time.perf_counter()
        while True:
            status = self.api.cuEventQuery(event)
            took = time.perf_counter() - start
            if status != abi.NOT_READY or took > seconds:
                return status, took
            time.sleep(0)

    # ---- memory ------------------------------------------------------------------------------

    def memory(self, nbytes: int) -> int:
        """Allocate device memory."""
        return self.api.made("cuMemAlloc_v2", nbytes, kind=ctypes.c_ulonglong)

    def word(self) -> Word:
        """Give a word of pinned memory, each in a cache line of its own."""
        if self._used + SLOT > PAGE:
            self._page = self.api.made("cuMemHostAlloc", PAGE, abi.PORTABLE_AND_MAPPED)
            self._used = 0
        host = self._page + self._used
        self._used += SLOT
        device = self.api.made("cuMemHostGetDevicePointer_v2", host, 0, kind=ctypes.c_ulonglong)
        return Word(host, device)

    def hold(self, stream: int) -> Word:
        """Hold a stream until the word that is given becomes 1 or more."""
        word = self.word()
        self.api.call("cuStreamWaitValue32_v2", stream, word.device, 1, abi.GREATER_OR_EQUAL)
        return word

    def fill(self, pointer: int, value: float, count: int, stream: int) -> None:
        """Write `count` equal float32 numbers to device memory, and wait for it."""
        source = np.full(count, value, np.float32)
        self.api.call(
            "cuMemcpyHtoDAsync_v2", pointer, source.ctypes.data, source.nbytes, stream
        )
        self.finish(stream)

    def read(self, pointer: int, count: int, stream: int) -> Any:
        """Read `count` float32 numbers behind all that is on a stream; a NumPy array."""
        target = np.zeros(count, np.float32)
        self.api.call(
            "cuMemcpyDtoHAsync_v2", target.ctypes.data, pointer, target.nbytes, stream
        )
        self.finish(stream)
        return target

    # ---- NCCL --------------------------------------------------------------------------------

    def unique_id(self) -> UniqueId:
        """Give rank 0's id to every rank; once a case."""
        if self.rank == 0:
            made = UniqueId()
            self.api.call("ncclGetUniqueId", ctypes.byref(made))
            self.board.say("unique-id", bytes(made).hex())
        return UniqueId.from_buffer_copy(bytes.fromhex(self.board.hear("unique-id", 0)))

    def communicator(self) -> int:
        """Make a communicator of all ranks, all of them on one device.

        Raises:
            NotTried: this NCCL does not make one; whether it does is a question of its own.
        """
        try:
            return self.join()
        except CallError as error:
            raise NotTried(
                f"no communicator of {self.ranks} ranks on one GPU: {error}"
            ) from error

    def join(self) -> int:
        """As `communicator`, but what NCCL answers is what is raised."""
        self.notebook.doing("ncclCommInitRank")
        return self.api.made("ncclCommInitRank", self.ranks, self.unique_id(), self.rank)

    def all_reduce(self, comm: int, send: int, recv: int, count: int, stream: int) -> None:
        """Sum float32 numbers over all ranks (``ncclAllReduce``)."""
        self.api.call("ncclAllReduce", send, recv, count, abi.FLOAT32, abi.SUM, comm, stream)

    def close(self, comm: int) -> None:
        """End a communicator with its peers."""
        self.notebook.doing("ncclCommFinalize")
        self.api.call("ncclCommFinalize", comm)
        self.notebook.doing("ncclCommDestroy")
        self.api.call("ncclCommDestroy", comm)
