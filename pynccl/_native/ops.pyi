from collections.abc import Mapping
from typing import Any

from pynccl._native.issue import Issuer
from pynccl._native.operators import PreMulSum
from pynccl._native.work import Work
from pynccl.types import Reduction

class Operations(Issuer):
    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        op: Reduction | PreMulSum = "sum",
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        config: Mapping[str, Any] | None = None,
        timed: bool = False,
    ) -> Work: ...
    def reduce(
        self,
        x: Any,
        out: Any = None,
        op: Reduction | PreMulSum = "sum",
        root: int = 0,
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        config: Mapping[str, Any] | None = None,
        timed: bool = False,
    ) -> Work: ...
    def broadcast(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        config: Mapping[str, Any] | None = None,
        timed: bool = False,
    ) -> Work: ...
    def all_gather(
        self,
        x: Any,
        out: Any = None,
        *,
        stack: bool = False,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        config: Mapping[str, Any] | None = None,
        timed: bool = False,
    ) -> Work: ...
    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        op: Reduction | PreMulSum = "sum",
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        config: Mapping[str, Any] | None = None,
        timed: bool = False,
    ) -> Work: ...
    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        config: Mapping[str, Any] | None = None,
        timed: bool = False,
    ) -> Work: ...
    def gather(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        stack: bool = False,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        config: Mapping[str, Any] | None = None,
        timed: bool = False,
    ) -> Work: ...
    def scatter(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        config: Mapping[str, Any] | None = None,
        timed: bool = False,
    ) -> Work: ...
    def send(
        self,
        x: Any,
        peer: int,
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
    def recv(
        self,
        x: Any,
        peer: int,
        *,
        pack: bool = False,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
    def barrier(
        self, *, stream: Any = None, timeout: float | None = None, timed: bool = False
    ) -> Work: ...
    def slot(self, array: Any) -> Any: ...
