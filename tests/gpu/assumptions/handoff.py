"""Hand-off between an array library's kernels and pynccl's operations, with no host wait.

One round goes through the communicator's worker thread (the first of its kind), the others are
issued inline: both ways must keep the order of the streams.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from .producers import BUSY_S, PRODUCERS, Producer
from .stage import Stage

ROUNDS = 3


def run(stage: Stage, library: str) -> None:
    """Sum what a long kernel writes, and read it with kernels on two streams.

    Args:
        stage: two ranks.
        library: whose arrays and streams: "torch", "cupy" or, on the host engine, "numpy".
    """
    stage.notebook.doing(f"the start of {library}")
    producer: Producer = PRODUCERS[library](stage)
    asyncio.run(_rounds(stage, producer))


async def _rounds(stage: Stage, producer: Producer) -> None:
    import pynccl

    note = stage.notebook
    note.doing("pynccl.connect")
    comm = await pynccl.connect(
        f"file://{stage.board.folder / 'rendezvous'}",
        rank=stage.rank,
        size=stage.ranks,
        device=producer.device,
        timeout=20.0,
    )
    slowest = 0.0
    wrong: dict[str, int] = {}
    for turn in range(ROUNDS):
        note.doing(f"round {turn + 1}")
        slowest = max(slowest, await _round(stage, producer, comm, turn, wrong))
    note.measure(slowest_call_ms=round(slowest * 1e3, 2), kernel_ms=BUSY_S * 1e3)
    for what, bad in wrong.items():
        note.check(f"{what} in every round", bad == 0, f"{bad} elements are wrong")
    quick = slowest < BUSY_S / 2
    note.check("no call waits for the kernel before it", quick, f"{slowest * 1e3:.1f} ms")
    note.doing("close")
    await comm.close()


async def _round(
    stage: Stage, producer: Producer, comm: Any, turn: int, wrong: dict[str, int]
) -> float:
    expected = sum(rank + 1 + 10 * turn for rank in range(stage.ranks))
    x = producer.array()
    # Warm what the library compiles or loads at first use; only then is the kernel the slow part.
    streams = producer.consumers()
    for stream in streams:
        producer.copy_on(stream, x)
    producer.numbers(x)
    producer.write_slowly(x, stage.rank + 1 + 10 * turn)
    start = time.perf_counter()
    work = comm.all_reduce(x, stream=producer.stream)
    copies = []
    for stream in streams:
        work.order(stream)
        copies.append(producer.copy_on(stream, x))
    took = time.perf_counter() - start
    await work
    found = {
        "the sum is that of what the kernels wrote": x,
        "the current stream's next kernel reads the sum": copies[0],
        "another stream's kernel behind order() reads the sum": copies[1],
    }
    for what, array in found.items():
        bad = int(np.count_nonzero(producer.numbers(array) != expected))
        wrong[what] = wrong.get(what, 0) + bad
    return took
