"""A program on nccl4py and cuda.core: RANK RANKS FILE. Prints a line for each check."""

from __future__ import annotations

import ctypes
import sys

import nccl.core as nccl
import numpy as np
import unique_id_file
from cuda.core import Device, LegacyPinnedMemoryResource
from nccl.bindings import nccl as bindings

RANK, RANKS, FILE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
COUNT = 1000
device = Device(RANK)
device.set_current()
stream = device.create_stream()
pinned = LegacyPinnedMemoryResource()


class Floats:
    """Device memory from ncclMemAlloc, seen as float32 by the CUDA array interface."""

    def __init__(self, count: int, value: float = 0.0) -> None:
        self.buffer = nccl.mem_alloc(4 * count)
        self.count = count
        self.fill(value)

    @property
    def __cuda_array_interface__(self) -> dict:
        return {
            "shape": (self.count,),
            "typestr": "<f4",
            "data": (int(self.buffer.handle), False),
            "version": 3,
            "stream": None,
        }

    def fill(self, value: float) -> None:
        self.buffer.fill(np.float32(value), stream=stream)

    def numpy(self) -> np.ndarray:
        staging = pinned.allocate(4 * self.count, stream=stream)
        self.buffer.copy_to(staging, stream=stream)
        stream.sync()
        raw = (ctypes.c_float * self.count).from_address(int(staging.handle))
        found = np.array(raw)
        staging.close()
        return found


def check(name: str, found: np.ndarray, expected: object) -> None:
    assert (found == expected).all(), f"{name}: {found} is not {expected}"
    print(name)


if RANK == 0:
    unique_id = nccl.get_unique_id()
    unique_id_file.leave(FILE, unique_id.as_bytes)
else:
    unique_id = nccl.UniqueId.from_bytes(unique_id_file.find(FILE))
# Communicator.init goes by ncclCommInitRankScalable, which not every release has.
made = bindings.comm_init_rank(RANKS, unique_id._internal.ptr, RANK)
comm = nccl.Communicator(made) if isinstance(made, int) else nccl.Communicator._from_comm(made)
assert (comm.nranks, comm.rank, comm.device.device_id) == (RANKS, RANK, RANK)
print("communicator", nccl.get_version().libnccl.version)

total = RANKS * (RANKS + 1) / 2
blocks = np.repeat(np.arange(1.0, RANKS + 1), COUNT)
one, many = Floats(COUNT, RANK + 1), Floats(COUNT * RANKS, RANK + 1)
out, wide = Floats(COUNT), Floats(COUNT * RANKS)

comm.allreduce(one, out, nccl.SUM, stream=stream)
check("allreduce", out.numpy(), total)
comm.allreduce(one, out, nccl.AVG, stream=stream)
check("average", out.numpy(), total / RANKS)
comm.reduce(one, out, nccl.MAX, root=0, stream=stream)
if RANK == 0:
    check("reduce", out.numpy(), RANKS)
comm.broadcast(one, out, root=1, stream=stream)
check("broadcast", out.numpy(), 2)
comm.allgather(one, wide, stream=stream)
check("allgather", wide.numpy(), blocks)
comm.reduce_scatter(many, out, nccl.SUM, stream=stream)
check("reduce_scatter", out.numpy(), total)
comm.alltoall(many, wide, stream=stream)
check("alltoall", wide.numpy(), blocks)
comm.gather(one, wide, root=0, stream=stream)
if RANK == 0:
    check("gather", wide.numpy(), blocks)
comm.scatter(wide, out, root=0, stream=stream)
check("scatter", out.numpy(), RANK + 1)

after, before = (RANK + 1) % RANKS, (RANK - 1) % RANKS
with nccl.group():
    comm.send(one, after, stream=stream)
    comm.recv(out, before, stream=stream)
check("group", out.numpy(), before + 1)

half = comm.split(color=RANK % 2, key=-RANK)
half.allreduce(one, out, nccl.SUM, stream=stream)
alike = [rank + 1 for rank in range(RANKS) if rank % 2 == RANK % 2]
check("split", out.numpy(), sum(alike))
half.destroy()

scaled = comm.create_pre_mul_sum(0.5, nccl.FLOAT32)
comm.allreduce(one, out, scaled, stream=stream)
check("pre_mul_sum", out.numpy(), total / 2)
scaled.close()

window = comm.register_window(out, nccl.WindowFlag.COLL_SYMMETRIC)
source = comm.register_window(one, nccl.WindowFlag.COLL_SYMMETRIC)
assert window.is_valid
assert source.is_valid
stream.sync()
comm.put_signal(one, after, window, stream=stream)
comm.wait_signal(nccl.WaitSignalDesc(peer=before), stream=stream)
check("window", out.numpy(), before + 1)
window.close()
source.close()

comm.finalize()
comm.destroy()
print("done")
