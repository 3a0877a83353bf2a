from collections.abc import Mapping
from typing import Any

from typing_extensions import Self

from pynccl._native.uneven import UnevenOperations
from pynccl._native.work import Work

CONFIG_FIELDS: dict[str, int]

class Control:
    def __new__(cls, config: Mapping[str, Any] | None = None) -> Self: ...
    def fill(self, config: dict[str, Any]) -> None: ...

def check_config(config: Mapping[str, Any] | None) -> None: ...

class Lifecycle(UnevenOperations):
    def _native_init(
        self, unique_id: bytes, config: Mapping[str, Any] | None, timeout: float | None
    ) -> Work: ...
    def _native_split(
        self,
        child: Lifecycle,
        color: int | None,
        key: int,
        config: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> Work: ...
    def _native_close(self, timeout: float | None) -> Work: ...

def split_member(work: Work) -> bool: ...
def abort_all(comms: list[Lifecycle], timeout: float | None, bound: float) -> Work: ...
def live() -> dict[str, int]: ...
def set_launch_blocking(on: bool) -> None: ...
