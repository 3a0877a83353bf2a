from collections.abc import Mapping
from typing import Any

from pynccl._native.ops import Operations
from pynccl._native.work import Work

class Side: ...

class OneSided(Operations):
    def put(
        self,
        x: Any,
        window: Any,
        peer: int,
        offset: int = 0,
        *,
        signal: int = 0,
        context: int = 0,
        stream: Any = None,
        sync: bool = True,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
    def signal(
        self,
        peer: int,
        *,
        signal: int = 0,
        context: int = 0,
        stream: Any = None,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
    def wait_signal(
        self,
        peer: int | Mapping[int, int],
        count: int = 1,
        *,
        signal: int = 0,
        context: int = 0,
        stream: Any = None,
        timeout: float | None = None,
        timed: bool = False,
    ) -> Work: ...
