"""What it costs to issue, and how many launches a stream that stands still takes up.

pynccl makes a call inline only while fewer than 128 operations are in flight on the device, so
that the call never meets a full launch queue.
"""

from __future__ import annotations

import statistics
import threading
import time

import numpy as np

from . import abi
from .stage import Stage, Word

IN_FLIGHT = 128
TIMED = 400
BATCH = 50
LIMIT_US = 100.0
"""A tenth of the 1 ms heartbeat of an event loop."""
BOUND = 4096
BLOCKED_S = 0.4
SLOW_S = 0.001
COUNT = 1024


class Watch(threading.Thread):
    """Opens the gate as soon as one launch has lasted so long that it must be blocked."""

    def __init__(self, gate: Word) -> None:
        super().__init__(daemon=True)
        self.gate = gate
        self.started: float | None = None
        self.blocked = False
        self.over = False

    def run(self) -> None:
        while not self.over:
            started = self.started
            if started is not None and time.perf_counter() - started > BLOCKED_S:
                self.blocked = True
                break
            time.sleep(0.01)
        self.gate.store(1)


def run(stage: Stage) -> None:
    """Measure both with two ranks; rank 0's stream is the one that is held."""
    note, board = stage.notebook, stage.board
    comm = stage.communicator()
    stream, event = stage.stream(), stage.event()
    send, recv = stage.memory(4 * COUNT), stage.memory(4 * COUNT)
    stage.fill(send, stage.rank + 1, COUNT, stream)

    def issue() -> None:
        stage.all_reduce(comm, send, recv, COUNT, stream)
        stage.api.call("cuEventRecord", event, stream)

    note.doing("ncclAllReduce, warming up")
    for _ in range(BATCH):
        issue()
    stage.finish(stream)
    note.doing("ncclAllReduce, timed")
    times = []
    for turn in range(TIMED):
        if turn % BATCH == 0:
            stage.finish(stream)
            board.meet()
        start = time.perf_counter()
        issue()
        times.append((time.perf_counter() - start) * 1e6)
    stage.finish(stream)
    board.meet()
    times.sort()
    median = statistics.median(times)
    note.measure(issue_us=round(median, 2), issue_p99_us=round(times[TIMED * 99 // 100], 2))
    note.check(f"issuing takes less than {LIMIT_US:g} us (median)", median < LIMIT_US, median)
    if stage.shared.ranks > 1:
        raise abi.NotTried("two ranks of one process would fill one launch queue together")
    if stage.rank == 0:
        _fill_queue(stage, stream, issue)
    else:
        issued = int(board.hear("issued", 0))
        note.doing(f"ncclAllReduce, as many as rank 0 made ({issued})")
        for _ in range(issued):
            issue()
    stage.finish(stream)
    total = stage.read(recv, COUNT, stream)
    expected = sum(rank + 1 for rank in range(stage.ranks))
    note.check("the sums are right", bool(np.all(total == expected)), total[:4])


def _fill_queue(stage: Stage, stream: int, issue: object) -> None:
    assert callable(issue)
    note = stage.notebook
    note.doing("ncclAllReduce on a held stream")
    gate = stage.hold(stream)
    pending = stage.mark(stream)
    watch = Watch(gate)
    watch.start()
    issued, slow = 0, None
    while issued < BOUND and not watch.blocked:
        watch.started = start = time.perf_counter()
        issue()
        took = time.perf_counter() - start
        watch.started = None
        issued += 1
        if slow is None and took > SLOW_S:
            slow = issued
    # The operation that blocked went through when the gate was opened: it found no room.
    depth = issued - 1 if watch.blocked else issued
    held = stage.api.cuEventQuery(pending) == abi.NOT_READY
    watch.over = True
    watch.join()
    stage.board.say("issued", str(issued))
    note.measure(
        operations_before_block=depth if watch.blocked else f"more than {depth}",
        first_over_1_ms=slow or "none",
    )
    note.check("the stream stood still meanwhile", held or watch.blocked)
    note.check(f"{IN_FLIGHT} operations fit before one blocks", depth >= IN_FLIGHT, depth)
