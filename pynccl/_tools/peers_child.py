"""One rank of `bench --peers`: the host engine's C API, mpi4py, or torch.distributed's gloo.

Run as ``python peers_child.py CONTENDER ...`` by any interpreter that has NumPy; it prints one
line of JSON, microseconds by case. pynccl is not imported; the rivals may lack it.
Each contender is called from the same loop: mpi4py's buffer calls, torch's all_reduce, and for
the host engine two ctypes calls, the collective and the stream's synchronisation.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

KIB, MIB = 1 << 10, 1 << 20
ALL_REDUCES = {2: (8, 64 * KIB, MIB, 64 * MIB), 4: (8, 64 * MIB)}  # by the number of ranks
TURNS = {8: 20_000, 64 * KIB: 400, MIB: 60, 64 * MIB: 12}
MOVES = ("all_gather", "reduce_scatter", "broadcast", "all_to_all")
MOVED = 16 * MIB  # the larger of the two buffers
WHOLE = ("all_gather", "all_to_all")  # every rank takes as much as all give
MOVE_TURNS = 40
ROUNDS = 20
SETTLE_S = 0.2
FLOAT32, SUM = 7, 0  # of nccl.h
IN_C = "all_reduce 8, called from C"


def settle() -> None:
    """Be busy for a while, so that the kernel spreads the ranks evenly over the cores."""
    end = time.perf_counter() + SETTLE_S
    while time.perf_counter() < end:
        pass


def median_us(turn: Callable[[], object], turns: int) -> float:
    """A turn's time: the median of about twenty rounds.

    Not of single turns: ranks that share a core make several at once, and are away for as many.
    """
    turn()  # all of them from here on
    settle()
    for _ in range(2 + turns // 10):
        turn()
    each = max(turns // ROUNDS, 1)
    times = []
    for _ in range(turns // each):
        start = time.perf_counter_ns()
        for _ in range(each):
            turn()
        times.append((time.perf_counter_ns() - start) / each)
    return statistics.median(times) / 1e3


def require(case: str, found: Any, wanted: Any) -> None:
    """Raise unless a result is right."""
    if not np.array_equal(found, wanted):
        raise AssertionError(f"{case}: {found[:4]} instead of {wanted[:4]}")


class Case:
    """The buffers of one rank, and what must be in them afterwards."""

    def __init__(self, name: str, nbytes: int, rank: int, size: int) -> None:
        self.name, self.size, self.count = name, size, nbytes // 4
        self.block = self.count // size
        wide_in = name in ("reduce_scatter", "all_to_all", "all_reduce", "broadcast")
        wide_out = name != "reduce_scatter"
        given = np.arange(self.count if wide_in else self.block, dtype=np.float32) % 1000
        self.send = given + np.float32(rank)
        self.recv = np.zeros(self.count if wide_out else self.block, np.float32)
        all_ranks = [given + np.float32(peer) for peer in range(size)]
        mine = slice(rank * self.block, (rank + 1) * self.block)
        if name == "all_reduce":
            self.wanted = sum(all_ranks)
        elif name == "reduce_scatter":
            self.wanted = sum(all_ranks)[mine]
        elif name == "broadcast":
            self.wanted = all_ranks[0]
        elif name == "all_gather":
            self.wanted = np.concatenate(all_ranks)
        else:
            self.wanted = np.concatenate([peer[mine] for peer in all_ranks])

    def measure(self, turn: Callable[[], object], turns: int) -> float:
        """One checked turn, then the median."""
        turn()
        require(self.name, self.send if self.name == "broadcast" else self.recv, self.wanted)
        return median_us(turn, turns)


def measure(
    calls: dict[str, Callable[[Case], Callable[[], object]]],
    rank: int,
    size: int,
    fewer: int = 1,
) -> dict[str, float]:
    """Every case that the contender has a call for; slow ones make fewer turns."""
    found = {}
    for nbytes in ALL_REDUCES[size]:
        case = Case("all_reduce", nbytes, rank, size)
        found[f"all_reduce {nbytes}"] = case.measure(
            calls["all_reduce"](case), max(TURNS[nbytes] // fewer, TURNS[64 * MIB])
        )
    for name in MOVES if size == 2 else ():
        if name in calls:
            case = Case(name, MOVED, rank, size)
            found[name] = case.measure(calls[name](case), MOVE_TURNS)
    return found


# ---- contenders ----------------------------------------------------------------------------


class Host:
    """The host engine as a C library."""

    def __init__(self, library: str, rank: int, size: int, unique_id: bytes) -> None:
        word, number = ctypes.c_void_p, ctypes.c_int

        class Id(ctypes.Structure):
            _fields_ = (("internal", ctypes.c_char * 128),)

        self.library = ctypes.CDLL(library)
        self.library.ncclGetLastError.restype = ctypes.c_char_p
        context, self.comm, self.stream = word(), word(), word()
        self.check(self.library.cuInit(0))
        self.check(self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self.check(self.library.cuCtxSetCurrent(context))
        self.check(self.library.cuStreamCreateWithPriority(ctypes.byref(self.stream), 1, 0))
        init = self.library.ncclCommInitRank
        init.argtypes = [word, number, Id, number]
        self.check(init(ctypes.byref(self.comm), size, Id.from_buffer_copy(unique_id), rank))
        self.synchronize = self.library.cuStreamSynchronize

    def check(self, result: int) -> None:
        """Raise if a call failed."""
        if result:
            raise RuntimeError(f"result {result}: {self.library.ncclGetLastError(None)}")

    def call(self, function: str, *arguments: int) -> Callable[[], object]:
        """The collective and the wait for its stream.

        The arguments are C values already: converting them anew would be most of a short call.
        """
        send, recv, count, *numbers = arguments
        bound, synchronize, stream = (
            getattr(self.library, function),
            self.synchronize,
            self.stream,
        )
        values: tuple[Any, ...] = (
            *(ctypes.c_void_p(send), ctypes.c_void_p(recv), ctypes.c_size_t(count)),
            *map(ctypes.c_int, numbers),
            *(self.comm, stream),
        )

        def turn() -> None:
            bound(*values)
            synchronize(stream)

        self.check(bound(*values) or synchronize(stream))
        return turn

    def allocate(self, count: int) -> Any:
        """A float32 array in memory of ncclMemAlloc."""
        pointer = ctypes.c_void_p()
        self.check(self.library.ncclMemAlloc(ctypes.byref(pointer), ctypes.c_size_t(4 * count)))
        assert pointer.value is not None
        memory: Any = (ctypes.c_char * (4 * count)).from_address(pointer.value)
        return np.frombuffer(memory, np.float32)


def host(library: str, rank: int, size: int, unique_id: str) -> dict[str, float]:
    """Ordinary memory, and registered memory with what the same loads and stores cost."""
    engine = Host(library, rank, size, bytes.fromhex(unique_id))

    def ends(case: Case) -> tuple[int, int]:
        return case.send.ctypes.data, case.recv.ctypes.data

    def bcast(case: Case) -> Callable[[], object]:
        at = case.send.ctypes.data
        return engine.call("ncclBroadcast", at, at, case.count, FLOAT32, 0)

    found = {IN_C: in_c(engine, Case("all_reduce", 8, rank, size))}
    found |= measure(
        {
            "all_reduce": lambda c: engine.call(
                "ncclAllReduce", *ends(c), c.count, FLOAT32, SUM
            ),
            "all_gather": lambda c: engine.call("ncclAllGather", *ends(c), c.block, FLOAT32),
            "reduce_scatter": lambda c: engine.call(
                "ncclReduceScatter", *ends(c), c.block, FLOAT32, SUM
            ),
            "broadcast": bcast,
            "all_to_all": lambda c: engine.call("ncclAlltoAll", *ends(c), c.block, FLOAT32),
        },
        rank,
        size,
    )
    if size == 2:
        found |= registered(engine, rank, size)
        found |= {
            f"{name} bound": memory_bound(engine, Case(name, MOVED, rank, size))
            for name in WHOLE
        }
    return found


def memory_bound(engine: Host, case: Case) -> float:
    """What both ranks need to copy as much as they take, at once, with nobody to wait for."""
    barrier = engine.call("ncclAllReduce", *[case.recv.ctypes.data] * 2, 2, FLOAT32, SUM)
    step = min(case.send.nbytes, case.recv.nbytes)
    places = [case.recv.ctypes.data + at for at in range(0, case.recv.nbytes, step)]
    copy = engine.library.pn_host_copy
    copy.argtypes, copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None

    def copies() -> None:
        for place in places:
            copy(place, case.send.ctypes.data, step)

    barrier()
    found = median_us(copies, MOVE_TURNS)
    barrier()
    return found


def in_c(engine: Host, case: Case) -> float:
    """The all-reduce of a caller in C: the case itself has what an interpreter adds."""
    send, recv = (ctypes.c_void_p(a.ctypes.data) for a in (case.send, case.recv))
    count, each = ctypes.c_size_t(case.count), TURNS[8] // ROUNDS
    turns = engine.library.pn_host_turns
    turns.restype = ctypes.c_int64

    def some() -> None:
        if turns(engine.comm, engine.stream, send, recv, count, each) < 0:
            raise RuntimeError(f"{engine.library.ncclGetLastError(None)}")

    return case.measure(some, ROUNDS) / each


def registered(engine: Host, rank: int, size: int) -> dict[str, float]:
    """In place, in memory of ncclMemAlloc."""
    nbytes = 64 * MIB
    a, b = (engine.allocate(nbytes // 4) for _ in range(2))
    barrier = engine.call("ncclAllReduce", b.ctypes.data, b.ctypes.data, 2, FLOAT32, SUM)
    a[:], b[:] = rank + 1, 0
    barrier()
    at = a.ctypes.data
    turn = engine.call("ncclAllReduce", at, at, a.size, FLOAT32, SUM)  # calls it once
    require("registered", a, np.full_like(a, size * (size + 1) / 2))
    barrier()
    a[:] = 0
    found = {"registered": median_us(turn, TURNS[nbytes])}
    # The same loads and stores with nobody to wait for: this rank's part of as many buffers.
    part, step = a.size // size, 4096

    def bound() -> None:
        for i in range(0, part, step):
            np.add(a[i : i + step], b[i : i + step], out=a[i : i + step])
            b[i : i + step] = a[i : i + step]

    barrier()
    found["bound"] = median_us(bound, TURNS[nbytes])
    barrier()
    return found


def mpi() -> dict[str, float]:
    """mpi4py's buffer calls."""
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD
    return measure(
        {
            "all_reduce": lambda c: lambda: world.Allreduce(c.send, c.recv),
            "all_gather": lambda c: lambda: world.Allgather(c.send, c.recv),
            "reduce_scatter": lambda c: lambda: world.Reduce_scatter_block(c.send, c.recv),
            "broadcast": lambda c: lambda: world.Bcast(c.send, 0),
            "all_to_all": lambda c: lambda: world.Alltoall(c.send, c.recv),
        },
        world.rank,
        world.size,
    )


def gloo(path: str, rank: int, size: int) -> dict[str, float]:
    """torch.distributed's all_reduce, which works in place."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)

    def all_reduce(case: Case) -> Callable[[], object]:
        tensor = torch.from_numpy(case.recv)
        tensor.copy_(torch.from_numpy(case.send))
        return lambda: dist.all_reduce(tensor)

    found = measure({"all_reduce": all_reduce}, rank, size, fewer=20)
    dist.destroy_process_group()
    return found


def main(contender: str, *rest: str) -> dict[str, float]:
    """Run one contender."""
    if contender == "host":
        return host(rest[0], int(rest[1]), int(rest[2]), rest[3])
    if contender == "gloo":
        return gloo(rest[0], int(rest[1]), int(rest[2]))
    return mpi()


if __name__ == "__main__":
    line = json.dumps(main(*sys.argv[1:]))
    os.write(1, f"{line}\n".encode())  # in one piece: the launchers mix the ranks' lines
