"""Sum an array over all ranks.

Four ranks in this process, or one rank a process by Open MPI, MPICH or torchrun, or by hand
with RANK 0 to 3::

    python examples/01_all_reduce.py
    mpirun -n 4 python examples/01_all_reduce.py
    RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 python examples/01_all_reduce.py

`--device cuda:0`, `--device cpu`; without it the GPU of the local rank, or the CPU where there
is none.
"""

import argparse
import asyncio
import os
from typing import Any

import numpy as np

import pynccl

LAUNCHERS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID")


def array_for(comm: pynccl.Communicator) -> Any:
    """Four numbers that tell the rank, on the communicator's device."""
    if comm.device == "cpu":
        return np.full(4, comm.rank + 1, np.float32)
    import torch

    return torch.full((4,), comm.rank + 1, dtype=torch.float32, device=comm.device)


async def rank_main(comm: pynccl.Communicator) -> None:
    """What each rank does."""
    async with comm:  # closed together with the others, or aborted if something goes wrong
        x = array_for(comm)
        await comm.all_reduce(x)  # in place; done when the await returns
        expected = sum(range(1, comm.size + 1))
        assert all(float(value) == expected for value in x), (x, expected)
        print(f"rank {comm.rank} of {comm.size}: {x.tolist()}, the right sum", flush=True)


async def main() -> None:
    """Meet the ranks that a launcher started, or be all four."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help='such as "cuda:0" or "cpu"')
    device = parser.parse_args().device
    if any(name in os.environ for name in LAUNCHERS):
        await rank_main(await pynccl.connect(device=device))
        return
    kind, _, number = (device or "cpu").partition(":")
    comms = await pynccl.create_all([f"{kind}:{int(number or 0) + i}" for i in range(4)])
    await asyncio.gather(*(rank_main(comm) for comm in comms))


if __name__ == "__main__":
    asyncio.run(main())
