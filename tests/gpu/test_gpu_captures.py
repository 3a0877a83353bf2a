"""What needs stream capture, on a driver made of Python.

It can do wrong what the host engine does right: the two assumptions can hold and fail.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from assumptions import abi, abort, polling
from assumptions.board import Board
from assumptions.notes import Notebook, Notes
from assumptions.stage import Shared, Stage
from assumptions.verdict import FAILS, HOLDS, CaseResult, Ending, judge

UNSUPPORTED, INVALIDATED = 900, 901


class CapturingApi(abi.Api):
    """A driver that captures, with an NCCL of which an abort may wait for graphs."""

    def __init__(
        self,
        *,
        guards: bool = True,
        relaxes: bool = True,
        abort_waits: bool = False,
        abort_ends: bool = True,
    ) -> None:
        self.guards = guards
        self.relaxes = relaxes
        self.abort_waits = abort_waits
        self.abort_ends = abort_ends
        self.graphs = 0
        self._captures = self._invalid = self._aborted = False
        self._thread = threading.local()
        self._numbers = itertools.count(1 << 12, 1 << 12)

    def __getattr__(self, name: str) -> Any:
        if name not in abi.FUNCTIONS:
            raise AttributeError(name)
        return lambda *_: abi.SUCCESS

    def _make(self, out: Any, *_: Any) -> int:
        out._obj.value = next(self._numbers)
        return abi.SUCCESS

    cuDevicePrimaryCtxRetain = cuStreamCreateWithPriority = cuEventCreate = _make
    cuMemAlloc_v2 = cuGraphInstantiateWithFlags = _make

    def ncclGetUniqueId(self, _: Any) -> int:
        return abi.SUCCESS

    def ncclCommInitRank(self, out: Any, *_: Any) -> int:
        return self._make(out)

    def cuMemcpyDtoHAsync_v2(self, target: int, _: int, nbytes: int, __: int) -> int:
        three = bytes(ctypes.c_float(3))
        ctypes.memmove(target, three * (nbytes // 4), nbytes)
        return abi.SUCCESS

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        before = getattr(self._thread, "mode", abi.CAPTURE_GLOBAL)
        self._thread.mode, mode._obj.value = mode._obj.value, before
        return abi.SUCCESS

    def cuStreamBeginCapture_v2(self, _: int, mode: int) -> int:
        self._captures = mode == abi.CAPTURE_GLOBAL
        return abi.SUCCESS

    def cuEventQuery(self, _: int) -> int:
        mode = getattr(self._thread, "mode", abi.CAPTURE_GLOBAL)
        relaxed = self.relaxes and mode == abi.CAPTURE_RELAXED
        if self._captures and self.guards and not relaxed:
            self._invalid = True
            return UNSUPPORTED
        return abi.SUCCESS

    def cuStreamEndCapture(self, _: int, graph: Any) -> int:
        if self._invalid:
            return INVALIDATED
        self.graphs += 1
        return self._make(graph)

    def cuGraphDestroy(self, _: Any) -> int:
        self.graphs -= 1
        return abi.SUCCESS

    def ncclCommAbort(self, _: int) -> int:
        first, self._aborted = not self._aborted, True
        graphs = self.graphs  # with its own, which is the next to be destroyed
        while self.abort_waits and graphs and self.graphs == graphs:
            time.sleep(0.001)
        while first and not self.abort_ends:
            time.sleep(0.001)
        return abi.SUCCESS


def tried(folder: Path, api: abi.Api, run: Any, argument: Any, ranks: int) -> CaseResult:
    """What a case's verdict is, all its ranks being threads of this process."""
    notebooks = [Notebook(folder / f"notes-{rank}.json") for rank in range(ranks)]

    def one(rank: int) -> None:
        board = Board(folder, rank, ranks)
        run(Stage("nccl", api, board, notebooks[rank], Shared(ranks)), argument)
        notebooks[rank].close("done")

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    notes: list[Notes] = [notebook.notes for notebook in notebooks]
    return judge("a", notes, [Ending(0)] * ranks)


@pytest.mark.parametrize(
    ("api", "relaxed", "verdict", "reason"),
    [
        (CapturingApi(), True, HOLDS, ""),
        (CapturingApi(), False, HOLDS, ""),
        (CapturingApi(relaxes=False), True, FAILS, "not so: the query answers (900)"),
        (CapturingApi(guards=False), False, FAILS, "not so: outside relaxed mode the query"),
    ],
)
def test_polling(
    tmp_path: Path, api: CapturingApi, relaxed: bool, verdict: str, reason: str
) -> None:
    result = tried(tmp_path, api, polling.run, relaxed, 1)
    assert result.verdict == verdict
    assert reason in result.reason


@pytest.mark.parametrize("waits", [False, True])
def test_abort_with_a_graph_alive(tmp_path: Path, waits: bool) -> None:
    result = tried(tmp_path, CapturingApi(abort_waits=waits), abort.run, "graph", 2)
    assert (result.verdict, result.reason) == (HOLDS, "")
    assert "the graph's sum is right" in result.claims
    assert result.measured["waited_for_the_graph"] == waits


def test_an_abort_that_does_not_end_with_the_graph_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abort, "BOUND_S", 0.5)
    api = CapturingApi(abort_ends=False)
    result = tried(tmp_path, api, abort.run, "graph", 2)
    api.abort_ends = True  # for the threads that are still inside
    assert result.verdict == FAILS
    assert "not so: the abort ended, or did within 0.5 s of the graph's end" in result.reason
