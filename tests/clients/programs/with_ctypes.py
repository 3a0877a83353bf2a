"""A program with an NCCL wrapper of its own, as inference servers carry: RANK RANKS FILE.

A table of prototypes, a class that binds them to a library that is opened by its path, and
all-reduces captured in a CUDA graph that is replayed for each step.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import unique_id_file

FLOAT32, SUM = 7, 0
RELAXED, THREAD_LOCAL = 2, 1
COUNT = 4096


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


Comm = Stream = Pointer = ctypes.c_void_p
Size = ctypes.c_size_t
NCCL = {
    "ncclGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(Comm), ctypes.c_int, UniqueId, ctypes.c_int),
    "ncclAllReduce": (Pointer, Pointer, Size, ctypes.c_int, ctypes.c_int, Comm, Stream),
    "ncclAllGather": (Pointer, Pointer, Size, ctypes.c_int, Comm, Stream),
    "ncclReduceScatter": (Pointer, Pointer, Size, ctypes.c_int, ctypes.c_int, Comm, Stream),
    "ncclBroadcast": (Pointer, Pointer, Size, ctypes.c_int, ctypes.c_int, Comm, Stream),
    "ncclSend": (Pointer, Size, ctypes.c_int, ctypes.c_int, Comm, Stream),
    "ncclRecv": (Pointer, Size, ctypes.c_int, ctypes.c_int, Comm, Stream),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclCommDestroy": (Comm,),
}
DRIVER = {
    "cuInit": (ctypes.c_uint,),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(Pointer), ctypes.c_int),
    "cuCtxSetCurrent": (Pointer,),
    "cuStreamCreate": (ctypes.POINTER(Stream), ctypes.c_uint),
    "cuStreamSynchronize": (Stream,),
    "cuMemAlloc_v2": (ctypes.POINTER(ctypes.c_ulonglong), Size),
    "cuMemcpyHtoD_v2": (ctypes.c_ulonglong, Pointer, Size),
    "cuMemcpyDtoH_v2": (Pointer, ctypes.c_ulonglong, Size),
    "cuStreamBeginCapture_v2": (Stream, ctypes.c_int),
    "cuStreamEndCapture": (Stream, ctypes.POINTER(Pointer)),
    "cuGraphInstantiateWithFlags": (ctypes.POINTER(Pointer), Pointer, ctypes.c_ulonglong),
    "cuGraphLaunch": (Pointer, Stream),
    "cuGraphExecDestroy": (Pointer,),
    "cuGraphDestroy": (Pointer,),
}


class Library:
    """Each function raises unless it returns 0."""

    def __init__(self, path: str, prototypes: dict[str, tuple[Any, ...]]) -> None:
        loaded = ctypes.CDLL(path)
        for name, arguments in prototypes.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            setattr(self, name, self._checked(name, function))

    @staticmethod
    def _checked(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> None:
            if code := function(*arguments):
                raise RuntimeError(f"{name}: {code}")

        return call


def main() -> None:
    rank, ranks, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    nccl: Any = Library(os.environ["WITH_LIBRARY"], NCCL)
    cuda: Any = Library("libcuda.so.1", DRIVER)
    version = ctypes.c_int()
    nccl.ncclGetVersion(ctypes.byref(version))
    print("version", version.value)

    cuda.cuInit(0)
    context, stream, comm = Pointer(), Stream(), Comm()
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), rank)
    cuda.cuCtxSetCurrent(context)
    cuda.cuStreamCreate(ctypes.byref(stream), 1)
    unique_id = UniqueId()
    if rank == 0:
        nccl.ncclGetUniqueId(ctypes.byref(unique_id))
        unique_id_file.leave(file, bytes(unique_id))
    else:
        unique_id = UniqueId.from_buffer_copy(unique_id_file.find(file))
    nccl.ncclCommInitRank(ctypes.byref(comm), ranks, unique_id, rank)

    def memory(count: int) -> int:
        pointer = ctypes.c_ulonglong()
        cuda.cuMemAlloc_v2(ctypes.byref(pointer), 4 * count)
        return pointer.value

    def put(pointer: int, value: float, count: int = COUNT) -> None:
        cuda.cuMemcpyHtoD_v2(pointer, (ctypes.c_float * count)(*[value] * count), 4 * count)

    def check(name: str, pointer: int, *expected: float) -> None:
        """Each value must fill a block of COUNT elements."""
        count = COUNT * len(expected)
        found = (ctypes.c_float * count)()
        cuda.cuStreamSynchronize(stream)
        cuda.cuMemcpyDtoH_v2(found, pointer, 4 * count)
        wanted = [value for value in expected for _ in range(COUNT)]
        assert list(found) == wanted, f"{name}: {found[0]} is not {expected}"
        print(name)

    total = ranks * (ranks + 1) / 2
    one, out, wide = memory(COUNT), memory(COUNT), memory(COUNT * ranks)
    put(one, rank + 1)
    nccl.ncclAllReduce(one, out, COUNT, FLOAT32, SUM, comm, stream)
    check("all_reduce", out, total)
    nccl.ncclAllGather(one, wide, COUNT, FLOAT32, comm, stream)
    check("all_gather", wide, *(r + 1.0 for r in range(ranks)))
    nccl.ncclReduceScatter(wide, out, COUNT, FLOAT32, SUM, comm, stream)
    check("reduce_scatter", out, ranks * (rank + 1.0))
    nccl.ncclBroadcast(one, out, COUNT, FLOAT32, ranks - 1, comm, stream)
    check("broadcast", out, float(ranks))
    nccl.ncclGroupStart()
    nccl.ncclSend(one, COUNT, FLOAT32, (rank + 1) % ranks, comm, stream)
    nccl.ncclRecv(out, COUNT, FLOAT32, (rank - 1) % ranks, comm, stream)
    nccl.ncclGroupEnd()
    check("send_recv", out, (rank - 1) % ranks + 1.0)

    graph, executable = Pointer(), Pointer()
    cuda.cuStreamBeginCapture_v2(stream, THREAD_LOCAL)
    nccl.ncclAllReduce(one, out, COUNT, FLOAT32, SUM, comm, stream)
    nccl.ncclAllReduce(out, out, COUNT, FLOAT32, SUM, comm, stream)
    cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
    cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0)
    for step in (1, 2, 3):
        put(one, step * (rank + 1))
        cuda.cuGraphLaunch(executable, stream)
        check(f"graph step {step}", out, ranks * step * total)
    cuda.cuGraphExecDestroy(executable)
    cuda.cuGraphDestroy(graph)
    nccl.ncclCommDestroy(comm)
    print("done")


main()
