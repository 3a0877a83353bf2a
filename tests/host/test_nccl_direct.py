"""Buffers that other ranks read and write directly: results, what is staged, what is mapped."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import nccl_ranks
import numpy as np
import pytest
from nccl_ranks import Rank
from test_nccl_collectives import BFLOAT16, FLOAT32, OPERATIONS, Case

if TYPE_CHECKING:
    from hostlib import Engine
    from support.reference import Array

MANY = 3_000_017  # beyond what stays in the caches
COUNT = 20_011  # beyond what goes through slots in any case, and no multiple of anything


def allocate(engine: Engine, nbytes: int) -> tuple[int, Array]:
    """Memory of ncclMemAlloc, and its bytes."""
    pointer = ctypes.c_void_p()
    nccl_ranks.must(engine, "ncclMemAlloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
    assert pointer.value is not None
    memory = (ctypes.c_ubyte * nbytes).from_address(pointer.value)
    return pointer.value, np.frombuffer(memory, np.uint8)


def staged(rank: Rank) -> int:
    """Bytes that this process has given through shared slots."""
    count = rank.engine.library.pn_host_staged
    count.restype = ctypes.c_uint64
    return int(count())


class Registered(Case):
    """The same case with both buffers in one allocation of ncclMemAlloc."""

    def buffers(self) -> tuple[Array, int, int]:
        whole, send, recv = super().buffers()
        self.pointer, memory = allocate(self.rank.engine, whole.nbytes)
        inside = memory.view(whole.dtype)
        inside[:] = whole
        return inside, send, recv

    def check(self) -> None:
        super().check()
        self.rank.must("ncclMemFree", ctypes.c_void_p(self.pointer))


def every_operation(rank: Rank, kind: type[Case]) -> int:
    """Each of them, in place and not; how many bytes were staged meanwhile."""
    before = staged(rank)
    for operation in OPERATIONS:
        for in_place in (False, True):
            if not (in_place and operation == "all_to_all"):
                kind(rank, operation, FLOAT32, COUNT, "sum", in_place).check()
    kind(rank, "all_reduce", BFLOAT16, COUNT, "avg", True).check()
    kind(rank, "reduce_scatter", BFLOAT16, COUNT, "avg", False).check()
    kind(rank, "reduce", 2, COUNT, "avg", False).check()
    for operation in ("all_reduce", "all_gather", "broadcast", "gather"):
        kind(rank, operation, FLOAT32, MANY, "max", False).check()
    after = staged(rank)
    rank.finish()
    return after - before


def everything(rank: Rank) -> int:
    return every_operation(rank, Registered)


@pytest.mark.parametrize("ranks", [2, 3])
def test_registered_memory_of_other_processes_is_not_staged(engine, temper, ranks):
    environment = {"PYNCCL_HOST_TEMPER": temper}
    found = nccl_ranks.run_processes(engine, ranks, everything, environment=environment)
    assert found == [0] * ranks


def ordinary(rank: Rank) -> int:
    before = staged(rank)
    Case(rank, "all_reduce", FLOAT32, COUNT, "sum", False).check()
    after = staged(rank)
    rank.finish()
    return after - before


def test_memory_of_one_process_is_not_staged(engine, temper):
    assert nccl_ranks.run_threads(engine, 3, ordinary) == [0] * 3


def test_ordinary_memory_of_other_processes_is_staged(engine, temper):
    environment = {"PYNCCL_HOST_TEMPER": temper}
    found = nccl_ranks.run_processes(engine, 2, ordinary, environment=environment)
    assert found == [4 * COUNT] * 2


def mixed(rank: Rank) -> None:
    """One rank's buffers can be reached, the others' cannot."""
    for operation in OPERATIONS:
        kind = Registered if rank.rank == 1 else Case
        kind(rank, operation, FLOAT32, COUNT, "sum", False).check()
        Case(rank, operation, FLOAT32, 3, "sum", False).check()
    rank.finish()


def test_ranks_need_not_agree_on_the_kind_of_memory(engine, temper):
    environment = {"PYNCCL_HOST_TEMPER": temper}
    nccl_ranks.run_processes(engine, 3, mixed, environment=environment)


def many_allocations(rank: Rank) -> list[int]:
    """More allocations than can be offered at a time; then all are freed. Mappings."""
    pointers = []
    for _ in range(70):
        pointer, memory = allocate(rank.engine, 4 * COUNT)
        pointers.append(pointer)
        array = memory.view(np.float32)
        array[:] = rank.rank + 1
        assert rank.all_reduce(array) == 0
        rank.synchronize()
        assert (array == rank.ranks * (rank.ranks + 1) / 2).all()
    counts = [shared_mappings()]
    for pointer in pointers:
        rank.must("ncclMemFree", ctypes.c_void_p(pointer))
    small = np.ones(1, np.float32)
    assert rank.all_reduce(small) == 0
    rank.synchronize()  # both have freed theirs
    Registered(rank, "all_reduce", FLOAT32, COUNT, "sum", True).check()
    rank.async_error(0.2)
    counts.append(shared_mappings())
    rank.finish()
    return counts


def shared_mappings() -> int:
    maps = Path("/proc/self/maps").read_text()
    return sum("memfd:pynccl" in line for line in maps.splitlines())


def test_what_was_freed_or_pushed_out_is_unmapped(engine, temper):
    environment = {"PYNCCL_HOST_TEMPER": temper}
    for full, end in nccl_ranks.run_processes(
        engine, 2, many_allocations, environment=environment
    ):
        assert full <= 70 + 64 + 1  # its own, those of the other, the communicator's
        assert end <= 3


def aborted(rank: Rank) -> None:
    """Rank 0 aborts in the middle, and what it gave to the others is unmapped at once."""
    nbytes = 8 << 20
    pointer, memory = allocate(rank.engine, nbytes)
    memory[:] = 0
    arguments = (pointer, pointer, nbytes // 4, FLOAT32, 0, rank.comm, rank.stream)
    rank.must("ncclAllReduce", *arguments)
    waiter = threading.Thread(target=rank.engine.cuStreamSynchronize, args=(rank.stream,))
    waiter.start()
    if rank.rank == 1:
        waiter.join(0.05)
    rank.must("ncclCommAbort", rank.comm)
    waiter.join()
    rank.must("ncclMemFree", ctypes.c_void_p(pointer))
    rank.engine.must("cuStreamDestroy_v2", rank.stream)


def test_nobody_touches_the_buffers_of_an_aborted_rank(engine, temper):
    for _ in range(5):
        nccl_ranks.run_threads(engine, 2, aborted)
