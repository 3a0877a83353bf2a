"""What the event behind an aborted operation says.

After an abort the kernel leaves at once and its event says success, as if the data were there.
That is why pynccl never takes an event's word once a communicator has failed.
"""

from __future__ import annotations

import numpy as np

from . import abi
from .abort import COUNT, sequence
from .stage import Stage

PENDING_S = 0.2
SETTLED_S = 5.0


def run(stage: Stage) -> None:
    """Abort rank 0's operation, which rank 1 never makes, and ask the event behind it."""
    note = stage.notebook
    comm = stage.communicator()
    stream = stage.stream()
    send, recv = stage.memory(4 * COUNT), stage.memory(4 * COUNT)
    stage.fill(send, stage.rank + 1, COUNT, stream)
    note.doing("ncclAllReduce of both ranks")
    stage.all_reduce(comm, send, recv, COUNT, stream)
    stage.fill(recv, 0, COUNT, stream)
    stage.board.meet()
    if stage.rank != 0:
        stage.board.hear("asked", 0)
        stage.api.call("ncclCommAbort", comm)
        return
    note.doing("ncclAllReduce of rank 0 alone")
    stage.all_reduce(comm, send, recv, COUNT, stream)
    event = stage.mark(stream)
    status, _ = stage.settle(event, PENDING_S)
    note.check("before the abort the event is pending", status == abi.NOT_READY, status)
    sequence(stage, comm)
    note.doing("the event after the abort")
    status, took = stage.settle(event, SETTLED_S)
    note.measure(status=status, after_ms=round(took * 1e3, 3))
    note.check("after the abort the event says success", status == abi.SUCCESS, status)
    if status == abi.SUCCESS:
        total = stage.read(recv, COUNT, stream)
        note.check("though the sum was never made", bool(np.any(total != 3)), total[:4])
    stage.board.say("asked")
