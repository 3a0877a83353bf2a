"""Ranks of the host engine for tests by ctypes: threads of this process, or processes.

A body is a function at the top level of a test module. It receives a :class:`Rank` and the
arguments of the call, and returns something that JSON can carry. A process is a fresh
interpreter, so that its settings are its own; a thread shares those of the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hostlib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

CUDA, SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE, IN_PROGRESS = range(1, 8)
HERE = Path(__file__).parent
LIMIT_S = 50.0


#: ncclConfig_t: where the members that tests set lie, in a struct of 120 bytes.
CONFIG_BYTES, CONFIG_MAGIC, CONFIG_VERSION = 120, 0xCAFEBEEF, 23203
CONFIG_INTEGERS = {
    "magic": 8,
    "version": 12,
    "blocking": 16,
    "cgaClusterSize": 20,
    "minCTAs": 24,
    "maxCTAs": 28,
    "splitShare": 40,
    "trafficClass": 44,
    "collnetEnable": 56,
    "CTAPolicy": 60,
    "shrinkShare": 64,
    "nvlsCTAs": 68,
    "nChannelsPerNetPeer": 72,
    "nvlinkCentricSched": 76,
    "graphUsageMode": 80,
    "numRmaCtx": 84,
    "maxP2pPeers": 88,
    "graphStreamOrdering": 92,
    "launchOrderImplicit": 96,
    "numRmaSig": 100,
    "rmaEagerInit": 104,
    "hostCftMode": 108,
    "nvlsHostMode": 112,
}


def config(size: int = CONFIG_BYTES, **members: int) -> ctypes.Array[ctypes.c_char]:
    """An ncclConfig_t with these members set and all others unset; `size` as it is told."""
    raw = bytearray(CONFIG_BYTES)
    raw[0:8] = size.to_bytes(8, sys.byteorder)
    unset = (1 << 31).to_bytes(4, sys.byteorder)
    values = {"magic": CONFIG_MAGIC, "version": CONFIG_VERSION, **members}
    for name, offset in CONFIG_INTEGERS.items():
        value = values.get(name)
        raw[offset : offset + 4] = (
            unset if value is None else (value & 0xFFFFFFFF).to_bytes(4, sys.byteorder)
        )
    return ctypes.create_string_buffer(bytes(raw), CONFIG_BYTES)


class NcclError(RuntimeError):
    """A function did not answer ncclSuccess but ``code``; ``text`` is the last error."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function}: {code}: {text}")
        self.code = code
        self.text = text


def last_error(engine: hostlib.Engine) -> str:
    """The text of ncclGetLastError."""
    return engine.ncclGetLastError(None).decode()


def must(engine: hostlib.Engine, name: str, *arguments: Any) -> None:
    """Call an NCCL function and raise NcclError unless it succeeds."""
    if code := getattr(engine, name)(*arguments):
        raise NcclError(name, code, last_error(engine))


def unique_id(engine: hostlib.Engine) -> hostlib.UniqueId:
    """A fresh id, offered by this process."""
    made = hostlib.UniqueId()
    must(engine, "ncclGetUniqueId", ctypes.byref(made))
    return made


def id_from(raw: bytes) -> hostlib.UniqueId:
    """The id of these 128 bytes."""
    return hostlib.UniqueId.from_buffer_copy(raw)


@contextlib.contextmanager
def on_device(engine: hostlib.Engine, device: int) -> Iterator[None]:
    """Make a device's primary context the calling thread's, as cudaSetDevice does."""
    context = engine.made("cuDevicePrimaryCtxRetain", device)
    engine.must("cuCtxSetCurrent", context)
    try:
        yield
    finally:
        engine.must("cuCtxSetCurrent", None)
        engine.must("cuDevicePrimaryCtxRelease_v2", device)


class Rank:
    """One rank: the engine, its communicator and one stream of the communicator's device."""

    def __init__(self, engine: hostlib.Engine, rank: int, ranks: int, device: int) -> None:
        self.engine = engine
        self.rank = rank
        self.ranks = ranks
        self.device = device
        self.comm = ctypes.c_void_p()
        self.stream = engine.stream()

    def must(self, name: str, *arguments: Any) -> None:
        """Call an NCCL function and raise NcclError unless it succeeds."""
        must(self.engine, name, *arguments)

    def state(self, comm: ctypes.c_void_p | None = None) -> int:
        """What ncclCommGetAsyncError says of this communicator, or of another one."""
        code = ctypes.c_int()
        self.must("ncclCommGetAsyncError", comm or self.comm, ctypes.byref(code))
        return code.value

    def settled(self, comm: ctypes.c_void_p | None = None, limit_s: float = 20.0) -> int:
        """The state when it is in progress no more."""
        end = time.monotonic() + limit_s
        while (code := self.state(comm)) == IN_PROGRESS:
            assert time.monotonic() < end, "in progress for too long"
            time.sleep(0.0005)
        return code

    def complete(self, name: str, *arguments: Any) -> None:
        """Call an NCCL function and wait until the communicator is ready; else NcclError."""
        code = getattr(self.engine, name)(*arguments)
        if code == IN_PROGRESS:
            code = self.settled()
        if code:
            raise NcclError(name, code, last_error(self.engine))

    def join(self, unique: hostlib.UniqueId) -> None:
        """Make the communicator."""
        self.must("ncclCommInitRank", ctypes.byref(self.comm), self.ranks, unique, self.rank)

    def configure(self, unique: hostlib.UniqueId, **members: int) -> None:
        """Make the communicator with a configuration, and wait until it is ready."""
        self.complete(
            "ncclCommInitRankConfig",
            ctypes.byref(self.comm),
            self.ranks,
            unique,
            self.rank,
            config(**members),
        )

    def split(self, color: int, key: int = 0) -> ctypes.c_void_p:
        """The child of this colour, NULL for colour -1; it has the parent's configuration."""
        child = ctypes.c_void_p()
        self.must("ncclCommSplit", self.comm, color, key, ctypes.byref(child), None)
        return child

    def synchronize(self) -> None:
        """Wait until the stream is done."""
        self.engine.must("cuStreamSynchronize", self.stream)

    def pending(self, for_s: float) -> bool:
        """Say whether the stream still has work after so many seconds of polling."""
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            if self.engine.cuStreamQuery(self.stream) != hostlib.NOT_READY:
                return False
            time.sleep(0.002)
        return True

    def async_error(self, wait_s: float = 0.0) -> int:
        """The communicator's asynchronous error, once there is one or the time has passed."""
        code = ctypes.c_int()
        end = time.monotonic() + wait_s
        while True:
            self.must("ncclCommGetAsyncError", self.comm, ctypes.byref(code))
            if code.value or time.monotonic() >= end:
                return code.value
            time.sleep(0.005)

    def all_reduce(
        self, array: Any, out: Any = None, op: int = 0, count: int | None = None
    ) -> int:
        """Call ncclAllReduce on float32, in place without `out`; return the result code."""
        into = array if out is None else out
        n = array.size if count is None else count
        code: int = self.engine.ncclAllReduce(
            array.ctypes.data, into.ctypes.data, n, 7, op, self.comm, self.stream
        )
        return code

    def finish(self) -> None:
        """Finalize and destroy the communicator and the stream."""
        self.complete("ncclCommFinalize", self.comm)
        self.must("ncclCommDestroy", self.comm)
        self.engine.must("cuStreamDestroy_v2", self.stream)

    def abandon(self) -> None:
        """Abort the communicator, and destroy the stream."""
        self.must("ncclCommAbort", self.comm)
        self.engine.must("cuStreamDestroy_v2", self.stream)


def run_threads(
    engine: hostlib.Engine,
    ranks: int,
    body: Callable[..., Any],
    *arguments: Any,
    settings: Mapping[str, int] | None = None,
) -> list[Any]:
    """Run the body on threads of this process, one device each; return the values by rank.

    The body's communicator is there already, made with `settings`, and the body ends it.
    """
    unique = unique_id(engine)
    values: list[Any] = [None] * ranks
    failures: list[tuple[int, Exception]] = []

    def one(number: int) -> None:
        try:
            with on_device(engine, number):
                rank = Rank(engine, number, ranks, number)
                if settings:
                    rank.configure(unique, **settings)
                else:
                    rank.join(unique)
                values[number] = body(rank, *arguments)
        except Exception as error:
            failures.append((number, error))

    threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(ranks)]
    end = time.monotonic() + LIMIT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and time.monotonic() < end and not failures:
            thread.join(0.05)
    for thread in threads:
        thread.join(1.0)  # after a failure the others may be stuck: they are daemons
    if failures:
        raise failures[0][1]
    stuck = [n for n, thread in enumerate(threads) if thread.is_alive()]
    assert not stuck, f"ranks {stuck} do not end"
    return values


class Child:
    """A rank in a process of its own."""

    def __init__(
        self,
        engine: hostlib.Engine,
        task: Mapping[str, Any],
        body: Callable[..., Any],
        environment: Mapping[str, str],
    ) -> None:
        library = str(Path(engine.library._name).resolve())
        self.process = subprocess.Popen(
            [sys.executable, __file__, body.__module__, body.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYNCCL_HOST_LIBRARY": library, **environment},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def result(self, limit_s: float = LIMIT_S) -> tuple[int, Any, str]:
        """The exit status, the value, and what it wrote to stderr."""
        try:
            out, errors = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, errors = self.process.communicate()
            return -1, None, f"did not end in {limit_s} s\n{errors}"
        lines = out.splitlines()
        status = self.process.returncode
        return status, json.loads(lines[-1]) if lines and status == 0 else None, errors


def run_processes(
    engine: hostlib.Engine,
    ranks: int,
    body: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    exits: Mapping[int, int] | None = None,
    settings: Mapping[str, int] | None = None,
) -> list[Any]:
    """Run the body in new processes; return the values in rank order.

    The id comes from this process, which is no rank. `exits` names the ranks that must end with
    another status than 0, and with which. `settings` is the communicators' configuration.
    """
    raw = bytes(unique_id(engine)).hex()
    children = [
        Child(
            engine,
            {
                "rank": n,
                "ranks": ranks,
                "id": raw,
                "arguments": arguments,
                "settings": dict(settings or {}),
            },
            body,
            environment or {},
        )
        for n in range(ranks)
    ]
    ends = [child.result() for child in children]
    for number, (status, _, errors) in enumerate(ends):
        wanted = (exits or {}).get(number, 0)
        assert status == wanted, f"rank {number} ended with {status}\n{errors}"
    return [value for _, value, _ in ends]


def main() -> None:
    """Run one rank: the task comes as a line on stdin, the value goes to stdout."""
    task = json.loads(sys.stdin.readline())
    sys.path.insert(0, str(HERE.parent))
    body = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    engine = hostlib.Engine()
    engine.must("cuInit", 0)
    with on_device(engine, 0):
        rank = Rank(engine, task["rank"], task["ranks"], 0)
        unique = id_from(bytes.fromhex(task["id"]))
        if settings := task.get("settings"):
            rank.configure(unique, **settings)
        else:
            rank.join(unique)
        value = body(rank, *task["arguments"])
    print(json.dumps(value))


if __name__ == "__main__":
    main()
