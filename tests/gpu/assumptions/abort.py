"""The way out of a call or a kernel that waits for a peer who will not come.

In one group: ncclCommAbort, which raises the flags; then a bounded wait until no thread is
inside a call on the communicator; then the end of the group, which reclaims it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np

from . import abi
from .stage import Stage

BOUND_S = 5.0
GRAPH_S = 0.5  # how long an abort is given before the graph that it may wait for is destroyed
"""pynccl gives a handle up when an abort has taken so long."""
SETTLED_S = 0.3
COUNT = 1024


class Inside(threading.Thread):
    """A thread in a call that should wait for the peer."""

    def __init__(self, stage: Stage, call: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self.stage = stage
        self.call = call
        self.result: int | None = None

    def run(self) -> None:
        self.stage.enter()
        self.result = self.call()

    def must_wait(self, name: str) -> None:
        """Start, and make sure that it is still inside a little later."""
        self.start()
        self.join(SETTLED_S)
        if not self.is_alive():
            raise abi.NotTried(f"{name} did not wait for the peer here (answer {self.result})")


def sequence(stage: Stage, comm: int, inside: Inside | None = None) -> None:
    """Abort a communicator as pynccl does, and check each step of it."""
    api, note = stage.api, stage.notebook
    api.call("ncclGroupStart")
    note.doing("ncclCommAbort")
    start = time.perf_counter()
    result = api.ncclCommAbort(comm)
    note.measure(abort_ms=_ms(start), abort_result=result)
    if inside is not None:
        note.doing("the call that the abort should end")
        inside.join(BOUND_S)
        note.measure(thread_out_ms=_ms(start), inside_result=inside.result)
        out = not inside.is_alive()
        note.check(f"the thread inside came out within {BOUND_S:g} s", out)
        if not out:
            return
    note.doing("ncclGroupEnd of the abort")
    result = api.ncclGroupEnd()
    took = time.perf_counter() - start
    note.measure(group_end_ms=_ms(start), group_end_result=result)
    note.check(f"the abort ended within {BOUND_S:g} s", took < BOUND_S, f"{took:.1f} s")


def _ms(start: float) -> float:
    return round((time.perf_counter() - start) * 1e3, 2)


def run(stage: Stage, inside: str) -> None:
    """Abort on rank 0 while rank 1 does nothing, then on rank 1.

    Args:
        stage: two ranks.
        inside: what rank 0 is in when it aborts: "init", "split", "first-call" (all of them
            calls that wait), "kernel" (of an operation that rank 1 never makes) or "graph"
            (idle, with a captured graph alive).
    """
    if inside == "init":
        _init(stage)
        return
    comm = stage.communicator()
    stream = stage.stream()
    send, recv = stage.memory(4 * COUNT), stage.memory(4 * COUNT)
    stage.fill(send, stage.rank + 1, COUNT, stream)
    if inside in ("kernel", "graph"):
        stage.notebook.doing("ncclAllReduce of both ranks")
        stage.all_reduce(comm, send, recv, COUNT, stream)
        stage.finish(stream)
    if inside == "graph":
        _graph(
            stage, comm, lambda: stage.all_reduce(comm, send, recv, COUNT, stream), stream, recv
        )
        return
    stage.board.meet()
    if stage.rank == 0:
        thread = None
        child = ctypes.c_void_p()
        if inside == "split":
            out = ctypes.byref(child)
            thread = Inside(stage, lambda: stage.api.ncclCommSplit(comm, 0, 0, out, None))
            thread.must_wait("ncclCommSplit")
        elif inside == "first-call":
            arguments = (send, recv, COUNT, abi.FLOAT32, abi.SUM, comm, stream)
            thread = Inside(stage, lambda: stage.api.ncclAllReduce(*arguments))
            thread.must_wait("the first ncclAllReduce")
        else:
            stage.all_reduce(comm, send, recv, COUNT, stream)
        sequence(stage, comm, thread)
    _peer_follows(stage, comm)


def _peer_follows(stage: Stage, comm: int) -> None:
    if stage.rank == 0:
        stage.board.say("aborted")
    else:
        stage.notebook.doing("wait for rank 0's abort")
        stage.board.hear("aborted", 0)
        sequence(stage, comm)


def _init(stage: Stage) -> None:
    unique = stage.unique_id()
    if stage.rank != 0:
        return  # it never comes
    comm = ctypes.c_void_p()
    out = ctypes.byref(comm)
    thread = Inside(stage, lambda: stage.api.ncclCommInitRank(out, stage.ranks, unique, 0))
    thread.must_wait("ncclCommInitRank")
    handle = comm.value
    stage.notebook.check("the handle is there while init still waits", handle is not None)
    if handle is not None:
        sequence(stage, handle, thread)


def _graph(stage: Stage, comm: int, issue: Callable[[], None], stream: int, recv: int) -> None:
    api, note = stage.api, stage.notebook
    note.doing("capture of an all-reduce")
    code = api.cuStreamBeginCapture_v2(stream, abi.CAPTURE_THREAD_LOCAL)
    if code:
        raise api.error("cuStreamBeginCapture_v2", code)
    issue()
    graph = ctypes.c_void_p()
    api.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    made = api.made("cuGraphInstantiateWithFlags", graph, 0)
    note.doing("launch of the captured all-reduce")
    stage.fill(recv, 0, COUNT, stream)
    api.call("cuGraphLaunch", made, stream)
    total = stage.read(recv, COUNT, stream)
    note.check("the graph's sum is right", bool(np.all(total == 3)), total[:4])
    stage.board.meet()
    if stage.rank == 0:
        _abort_under_graph(stage, comm, made, graph)
    _peer_follows_graph(stage, comm, made, graph)


def _abort_under_graph(stage: Stage, comm: int, made: int, graph: ctypes.c_void_p) -> None:
    """On a thread, so that destroying the graph can be tried as the way out."""
    api, note = stage.api, stage.notebook

    def abort() -> int:
        codes = [api.ncclGroupStart(), api.ncclCommAbort(comm), api.ncclGroupEnd()]
        return int(max(codes))

    note.doing("ncclCommAbort with a captured graph alive")
    thread = Inside(stage, abort)
    start = time.perf_counter()
    thread.start()
    thread.join(GRAPH_S)
    waits = thread.is_alive()
    api.call("cuGraphExecDestroy", made)
    api.call("cuGraphDestroy", graph)
    thread.join(BOUND_S)
    ended = not thread.is_alive()
    note.check(f"the abort ended, or did within {BOUND_S:g} s of the graph's end", ended)
    note.measure(waited_for_the_graph=waits, abort_ms=_ms(start), abort_result=thread.result)


def _peer_follows_graph(stage: Stage, comm: int, made: int, graph: ctypes.c_void_p) -> None:
    if stage.rank == 0:
        stage.board.say("aborted")
        return
    stage.board.hear("aborted", 0)
    stage.api.call("cuGraphExecDestroy", made)
    stage.api.call("cuGraphDestroy", graph)
    sequence(stage, comm)
