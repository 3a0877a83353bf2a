from collections.abc import Sequence
from typing import Any

from pynccl._native.onesided import OneSided
from pynccl._native.operators import PreMulSum
from pynccl._native.work import Work
from pynccl.types import Reduction

class Blocks:
    def __new__(cls, ranks: int) -> Blocks: ...
    def answer(self, work: Work) -> None: ...

class UnevenOperations(OneSided):
    def all_gather_v(
        self,
        x: Any,
        counts: Sequence[int] | None = None,
        out: Any = None,
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
    def gather_v(
        self,
        x: Any,
        counts: Sequence[int] | None = None,
        out: Any = None,
        root: int = 0,
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
    def all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int] | None = None,
        out: Any = None,
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
    def reduce_scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        out: Any = None,
        op: Reduction | PreMulSum = "sum",
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
    def scatter_v(
        self,
        x: Any,
        counts: Sequence[int] | None = None,
        out: Any = None,
        root: int = 0,
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
