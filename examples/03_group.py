"""Three operations as one: a group is issued together at the end of its block.

python examples/03_group.py [--ranks 2] [--device cpu]
"""

import argparse
import asyncio

import numpy as np

import pynccl


async def rank_main(comm: pynccl.Communicator) -> None:
    """What each rank does."""
    async with comm:  # closed together with the others, or aborted if something goes wrong
        gradients = np.full(1000, comm.rank + 1, np.float32)
        loss = np.array([float(comm.rank)], np.float64)
        settings = np.array([7, 8, 9] if comm.rank == 0 else [0, 0, 0], np.int32)
        async with pynccl.group() as issued:
            comm.all_reduce(gradients, op="avg")
            comm.all_reduce(loss, op="max")
            comm.broadcast(settings, root=0)
            # Nothing is issued yet: an exception here would issue nothing at all.
        assert np.allclose(gradients, (comm.size + 1) / 2)
        assert loss[0] == comm.size - 1
        assert settings.tolist() == [7, 8, 9]
        print(
            f"rank {comm.rank} of {comm.size}: {len(issued.works)} operations, all right",
            flush=True,
        )


async def main() -> None:
    """Run all ranks in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--device", default="cpu", choices=["cpu"], help="NumPy arrays: the CPU"
    )
    arguments = parser.parse_args()
    comms = await pynccl.create_all([f"{arguments.device}:{i}" for i in range(arguments.ranks)])
    await asyncio.gather(*(rank_main(comm) for comm in comms))


if __name__ == "__main__":
    asyncio.run(main())
