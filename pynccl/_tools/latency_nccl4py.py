"""One issue of nccl4py's all-reduce, by nccl4py on the host engine in a process of its own.

The no-op engine has less of a driver than cuda.core wants. On the host engine a call of one
rank and one element takes about a third of a microsecond more.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time

LOOPS = 2000
NEEDED = ("nccl.core", "cuda.core")


def absent() -> str:
    """Why it cannot be measured; empty if it can."""
    for name in NEEDED:
        try:
            if importlib.util.find_spec(name) is None:
                return f"{name} is not installed"
        except ModuleNotFoundError:
            return f"{name} is not installed"
    return ""


def issue_us(rounds: int) -> list[float]:
    """Microseconds of one call, so many times."""
    host = [sys.executable, "-m", "pynccl", "host", "--"]
    done = subprocess.run(
        [*host, sys.executable, os.fspath(__file__), str(rounds)],
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
    )
    return [float(value) for value in json.loads(done.stdout)]


def main(rounds: int) -> list[float]:
    """Measure, as a program that knows nothing of pynccl."""
    import nccl.core as nccl
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    buffer = nccl.mem_alloc(16)

    class Floats:
        """One float32 in device memory."""

        __cuda_array_interface__ = {  # noqa: RUF012 (read by others, by this very name)
            "shape": (1,),
            "typestr": "<f4",
            "data": (int(buffer.handle), False),
            "version": 3,
            "stream": None,
        }

    x = Floats()
    comm = nccl.Communicator.init(nranks=1, rank=0, unique_id=nccl.get_unique_id())
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter_ns()
        for _ in range(LOOPS):
            comm.allreduce(x, x, nccl.SUM, stream=stream)
        found.append((time.perf_counter_ns() - start) / LOOPS / 1e3)
        stream.sync()
    return found[1:]


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
