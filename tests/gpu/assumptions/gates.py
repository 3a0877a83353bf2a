"""Stream memory waits: a stream that stands still until a word of pinned memory is written.

pynccl holds the caller's stream by one when an operation on it has to be issued elsewhere.
"""

from __future__ import annotations

import statistics
import time

from . import abi
from .stage import Stage

ROUNDS = 30
HELD_S = 0.02
LIMIT_MS = 5.0
MANY = 16
"""More streams than a device has hardware queues by default (8)."""
FREE_S = 2.0


def run(stage: Stage, release: str) -> None:
    """Hold a stream, make sure that it stands still, let it go, and time that.

    Args:
        stage: one rank, which makes no communicator.
        release: by the "host", by another "stream", or "many": streams that are held at once,
            while yet another one must still run.
    """
    if release == "many":
        _many(stage)
        return
    note = stage.notebook
    stream, writer = stage.stream(), stage.stream()
    early, times = 0, []
    for turn in range(ROUNDS):
        note.doing(f"round {turn + 1} of a stream released by the {release}")
        word = stage.hold(stream)
        event = stage.mark(stream)
        status, _ = stage.settle(event, HELD_S if turn == 0 else 0.0)
        early += status != abi.NOT_READY
        start = time.perf_counter()
        if release == "host":
            word.store(1)
        else:
            stage.api.call("cuStreamWriteValue32_v2", writer, word.device, 1, 0)
        status, _ = stage.settle(event, FREE_S)
        times.append((time.perf_counter() - start) * 1e3)
        if status != abi.SUCCESS:
            note.check(f"the stream goes on when the {release} writes the word", False, status)
            return
    note.measure(
        release_us=round(statistics.median(times) * 1e3, 1),
        release_max_us=round(max(times) * 1e3, 1),
    )
    note.check(
        "the stream stands still until the word is written", early == 0, f"{early} did not"
    )
    median = statistics.median(times)
    note.check(f"it goes on within {LIMIT_MS:g} ms (median)", median < LIMIT_MS, f"{median} ms")


def _many(stage: Stage) -> None:
    """A held stream must not hold others: streams share hardware queues."""
    note = stage.notebook
    free = stage.stream()
    note.doing(f"{MANY} held streams")
    streams = [stage.stream() for _ in range(MANY)]
    words = [stage.hold(stream) for stream in streams]
    events = [stage.mark(stream) for stream in streams]
    memory = stage.memory(4096)
    stage.api.call("cuMemsetD8Async", memory, 1, 4096, free)
    status, took = stage.settle(stage.mark(free), FREE_S)
    note.measure(held=MANY, free_stream_us=round(took * 1e6, 1))
    note.check("another stream still runs", status == abi.SUCCESS, status)
    if status != abi.SUCCESS:
        return  # nothing could be learnt from a writer that stands still itself
    pending = sum(stage.api.cuEventQuery(event) == abi.NOT_READY for event in events)
    note.check("all held streams stand still", pending == MANY, f"{MANY - pending} do not")
    for word in words:
        stage.api.call("cuStreamWriteValue32_v2", free, word.device, 1, 0)
    stage.settle(events[-1], FREE_S)
    late = [event for event in events if stage.settle(event, LIMIT_MS / 1e3)[0] != abi.SUCCESS]
    note.check("the other stream releases them all", not late, f"{len(late)} are still held")
