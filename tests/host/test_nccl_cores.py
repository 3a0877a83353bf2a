"""Ranks that share a core: whoever polls gives way to the one that it waits for."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import hostlib
import nccl_ranks
import numpy as np

if TYPE_CHECKING:
    from nccl_ranks import Rank

TURNS = 300
SLICE_S = 0.0007  # the shortest for which the kernel leaves a busy process alone


def polls(rank: Rank, core: int) -> float:
    """Seconds of this core that all-reduces take, waited for by polling and nothing else."""
    os.sched_setaffinity(0, {core})
    x = np.ones(2, np.float32)
    event = rank.engine.event()
    for turn in range(TURNS + 10):
        if turn == 10:  # all have come
            begun = time.process_time()
        assert rank.all_reduce(x, op=2) == 0
        rank.engine.must("cuEventRecord", event, rank.stream)
        while rank.engine.cuEventQuery(event) == hostlib.NOT_READY:
            pass
    used = time.process_time() - begun
    rank.engine.must("cuEventDestroy_v2", event)
    rank.finish()
    return used


def test_a_poll_gives_way_to_a_rank_on_the_same_core(engine):
    """Without that each turn would last as long as the kernel lets a busy process run."""
    core = min(os.sched_getaffinity(0))
    # Others who want this core take turns too: the best of three is the ranks' own doing.
    runs = [max(nccl_ranks.run_processes(engine, 2, polls, core)) for _ in range(3)]
    assert min(runs) < TURNS * SLICE_S / 4
