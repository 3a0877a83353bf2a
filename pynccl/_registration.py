"""Registered buffers and windows: what ``comm.register`` and ``comm.register_window`` give."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pynccl._native.issue import Issuer
from pynccl._native.register import deregister, register
from pynccl.errors import NcclError

if TYPE_CHECKING:
    from typing_extensions import Self


class Registration:
    """Memory that NCCL knows, until ``close()`` or the end of its communicator.

    The call that makes it fixes its place in the order of its communicator; ``await`` it, or
    enter it by ``async with``, to know that it is there. It holds the buffer.
    """

    _window = False

    def __init__(
        self, comm: Issuer, buffer: Any, timeout: float | None, *, strict: bool = False
    ) -> None:
        self._comm: Issuer | None = comm
        self._lease, self._work, self._offset = register(
            comm, buffer, self._window, strict, timeout
        )

    @property
    def nbytes(self) -> int:
        """How much is registered: all of the allocation, where that is pynccl's own."""
        return self._lease.nbytes

    @property
    def offset(self) -> int:
        """Where the buffer begins in it, in bytes."""
        return self._offset

    def __await__(self) -> Generator[Any, Any, Self]:
        if self._work is not None:
            yield from self._work.__await__()
        return self

    async def close(self, timeout: float | None = 30.0) -> None:
        """Deregister it, when the operations that were called before have ended.

        The last one of several on one allocation does so natively. Local: it does not wait for
        the peers' calls. Nothing is left to do when the communicator has ended.
        """
        comm, self._comm = self._comm, None
        if comm is None:
            return
        work = deregister(comm, self._lease, timeout)
        if work is None:
            return
        try:
            await work
        except NcclError:
            if comm.state == "ready":
                raise

    async def __aenter__(self) -> Self:
        try:
            return await self
        except BaseException:
            await self.close()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "closed" if self._comm is None else "open"
        return f"<{type(self).__name__} of {self.nbytes} bytes, {state}>"


class Window(Registration):
    """Memory of every rank of a communicator that the others can reach."""

    _window = True
