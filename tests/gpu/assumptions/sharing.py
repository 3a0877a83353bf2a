"""Two ranks on one device: made, used and closed.

Threads of one process issue as pynccl does: the first call of a kind may wait for the peer and
holds no lock, every later one is made while a lock of the device is held.
"""

from __future__ import annotations

import time

import numpy as np

from .stage import Stage

COUNT = 1 << 18
ROUNDS = 20


def run(stage: Stage) -> None:
    """Sum over two ranks some times, checking every element, and close."""
    note, rank = stage.notebook, stage.rank
    start = time.perf_counter()
    comm = stage.join()
    note.measure(init_ms=round((time.perf_counter() - start) * 1e3, 1))
    stream = stage.stream()
    send, recv = stage.memory(4 * COUNT), stage.memory(4 * COUNT)
    wrong = 0
    start = time.perf_counter()
    for turn in range(ROUNDS):
        note.doing(f"ncclAllReduce {turn + 1} of {ROUNDS}")
        stage.fill(send, rank + 1 + 10 * turn, COUNT, stream)
        if turn == 0:
            stage.all_reduce(comm, send, recv, COUNT, stream)
        else:
            with stage.shared.issue:
                stage.all_reduce(comm, send, recv, COUNT, stream)
        expected = sum(one + 1 + 10 * turn for one in range(stage.ranks))
        wrong += int(np.count_nonzero(stage.read(recv, COUNT, stream) != expected))
    took = time.perf_counter() - start
    note.check("every element of every sum is right", wrong == 0, f"{wrong} are not")
    note.measure(round_ms=round(took / ROUNDS * 1e3, 3))
    start = time.perf_counter()
    stage.close(comm)
    note.measure(close_ms=round((time.perf_counter() - start) * 1e3, 1))
