from collections.abc import Sequence
from typing import Any, TypeAlias

from pynccl._native.ops import Operations
from pynccl._native.work import Work
from pynccl.types import Reduction

Counts: TypeAlias = Sequence[int]

class Blocks:
    def __new__(cls, ranks: int) -> Blocks: ...
    def answer(self, work: Work) -> None: ...

class UnevenOperations(Operations):
    def all_gather_v(
        self,
        x: Any,
        counts: Counts | None = None,
        out: Any = None,
        *,
        pack: bool = False,
        stream: Any = None,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
    def gather_v(
        self,
        x: Any,
        counts: Counts | None = None,
        out: Any = None,
        root: int = 0,
        *,
        pack: bool = False,
        stream: Any = None,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
    def all_to_all_v(
        self,
        x: Any,
        send_counts: Counts,
        recv_counts: Counts | None = None,
        out: Any = None,
        *,
        pack: bool = False,
        stream: Any = None,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
    def reduce_scatter_v(
        self,
        x: Any,
        counts: Counts,
        out: Any = None,
        op: Reduction = "sum",
        *,
        pack: bool = False,
        stream: Any = None,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
    def scatter_v(
        self,
        x: Any,
        counts: Counts | None = None,
        out: Any = None,
        root: int = 0,
        *,
        pack: bool = False,
        stream: Any = None,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
