"""Groups: several operations as one native group."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any

from pynccl._native.issue import Recorder
from pynccl.errors import UsageError


class Group:
    """Records the operations of this task on this thread, and issues them together at its end.

    ``async with group():`` also awaits them. ``with group() as g:`` issues them; ``await g``
    waits when it suits. An exception in the block issues nothing. A group inside a group joins
    the outer one. Child tasks, other tasks and other threads issue normally meanwhile.
    """

    def __init__(self) -> None:
        self._recorder = Recorder()
        self._joined = False
        self._state = "new"

    @property
    def works(self) -> list[Any]:
        """The recorded operations, in call order."""
        return list(self._recorder.works)

    def __enter__(self) -> Group:
        if self._state != "new":
            raise UsageError("a group can be used once")
        self._joined = not self._recorder.open()
        self._state = "open"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._state = "ended"
        if self._joined:
            return
        self._recorder.close()
        if kind is None:
            self._recorder.submit()
        else:
            self._recorder.drop()

    async def __aenter__(self) -> Group:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)
        if kind is None and not self._joined:
            await self

    def __await__(self) -> Generator[Any, Any, list[Any]]:
        """Wait for all of them; gives their results in call order."""
        if self._state != "ended":
            raise UsageError(
                "a group can be awaited when its block has ended: until then nothing is issued"
            )
        return self._all().__await__()

    async def _all(self) -> list[Any]:
        if self._joined:
            raise UsageError("this group joined an outer one; await that")
        return await wait(*self._recorder.works)


def group() -> Group:
    """Begin a group of operations (``ncclGroupStart``, ``ncclGroupEnd``); see Group."""
    return Group()


async def wait(*works: Any) -> list[Any]:
    """Await several Works: their results in order.

    All of them are waited for, also when one fails; then the first failure is raised.

    Raises:
        UsageError: an argument cannot be awaited, such as a list; nothing is waited for.
    """
    for work in works:
        if not hasattr(work, "__await__"):
            hint = ": wait(*works)" if isinstance(work, list | tuple) else ""
            raise UsageError(
                f"wait() takes Works, each as an argument of its own{hint}; "
                f"not a {type(work).__name__}"
            )
    results: list[Any] = []
    failure: BaseException | None = None
    for work in works:
        try:
            results.append(await work)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return results
