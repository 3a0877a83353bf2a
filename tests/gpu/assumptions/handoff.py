"""Hand-off between an array library's kernels and pynccl's operations, with no host wait.

One round goes through the communicator's worker thread (the first of its kind), the others are
issued inline: both ways must keep the order of the streams.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
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


@dataclass
class Seen:
    """What the rounds brought: one entry a round, and wrong elements by what was read."""

    call_ms: list[float] = field(default_factory=list)
    busy: list[bool] = field(default_factory=list)
    wrong: dict[str, int] = field(default_factory=dict)


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
    seen = Seen()
    for turn in range(ROUNDS):
        note.doing(f"round {turn + 1}")
        await _round(stage, producer, comm, turn, seen)
    slowest = max(seen.call_ms)
    note.measure(slowest_call_ms=round(slowest, 2))
    note.check("the kernel still ran when the calls had returned", all(seen.busy), seen.busy)
    note.check("no call waited for it", slowest < BUSY_S * 1e3 / 2, f"{slowest:.1f} ms")
    for what, bad in seen.wrong.items():
        note.check(f"{what}, in every round", bad == 0, f"{bad} elements are wrong")
    note.doing("close")
    await comm.close()


async def _round(stage: Stage, producer: Producer, comm: Any, turn: int, seen: Seen) -> None:
    expected = sum(rank + 1 + 10 * turn for rank in range(stage.ranks))
    x = producer.array()
    # What the library loads at first use is loaded now: only the kernel is to be slow.
    streams = producer.consumers()
    warm = [producer.copy_on(stream, x) for stream in streams]
    producer.numbers(warm[0])
    producer.write_slowly(x, stage.rank + 1 + 10 * turn)
    start = time.perf_counter()
    work = comm.all_reduce(x, stream=producer.stream)
    copies = []
    for stream in streams:
        work.order(stream)
        copies.append(producer.copy_on(stream, x))
    seen.call_ms.append((time.perf_counter() - start) * 1e3)
    seen.busy.append(producer.busy())
    await work
    found = {
        "the sum is that of what the kernels wrote": x,
        "the current stream's next kernel reads the sum": copies[0],
        "another stream's kernel behind order() reads the sum": copies[1],
    }
    for what, array in found.items():
        bad = int(np.count_nonzero(producer.numbers(array) != expected))
        seen.wrong[what] = seen.wrong.get(what, 0) + bad
