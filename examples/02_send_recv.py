"""Pass an array round a ring of ranks until everybody has seen everybody's.

python examples/02_send_recv.py [--ranks 4] [--device cpu]
"""

import argparse
import asyncio

import numpy as np

import pynccl


async def rank_main(comm: pynccl.Communicator) -> None:
    """What each rank does."""
    async with comm:  # closed together with the others, or aborted if something goes wrong
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        token = np.array([comm.rank], np.int64)
        seen = [comm.rank]
        for _ in range(comm.size - 1):
            arrived = np.empty_like(token)
            # Both in one group: alone, each rank's send would wait for a later receive.
            async with pynccl.group():
                comm.send(token, right)
                comm.recv(arrived, left)
            token = arrived
            seen.append(int(token[0]))
        assert sorted(seen) == list(range(comm.size)), seen
        print(f"rank {comm.rank} of {comm.size} has seen {seen}", flush=True)


async def main() -> None:
    """Run all ranks in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--device", default="cpu", choices=["cpu"], help="NumPy arrays: the CPU"
    )
    arguments = parser.parse_args()
    comms = await pynccl.create_all([f"{arguments.device}:{i}" for i in range(arguments.ranks)])
    await asyncio.gather(*(rank_main(comm) for comm in comms))


if __name__ == "__main__":
    asyncio.run(main())
