"""Communicator: the public face of one rank. The operations themselves are in _native.ops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from pynccl import _engines
from pynccl._native.lifecycle import Lifecycle, abort_all, check_config, split_member
from pynccl._registration import Registration, Window
from pynccl.errors import ConfigError, DeadlineError, NcclError, UsageError

#: Seconds that an abort waits for threads inside a native call before it gives their handles
#: up.
ABORT_BOUND = 5.0
#: Seconds that is waited for the abort behind a failed close: the deadline is over already.
CLOSE_GRACE = 0.25
#: Seconds that a block which ends with an exception waits for its abort; Ctrl-C waits behind
#: it.
LEAVE_GRACE = 1.0
#: Microseconds that an await polls before it suspends, where the peers have their own
#: processes.
SPIN_US = 20.0


class Communicator(Lifecycle):
    """One rank of a communicator.

    Made by ``pynccl.connect()``, ``create()``, ``create_all()`` or ``split()``. As an async
    context manager it is closed at the end of the block, and aborted if the block ends with an
    exception.
    """

    _session: Any = None
    _closing: Any = None

    @classmethod
    async def create(
        cls,
        size: int,
        rank: int,
        unique_id: bytes,
        *,
        device: str | int | None = None,
        config: Mapping[str, Any] | None = None,
        timeout: float | None = 60.0,
    ) -> Communicator:
        """Join a clique by a unique id that was brought here (``ncclCommInitRankConfig``).

        Args:
            size: how many ranks there are; every one calls this.
            rank: this rank's number, 0 to size - 1.
            unique_id: 128 bytes from ``unique_id()`` on one rank; an id serves once.
            device: see ``connect``.
            config: settings of ``ncclConfig_t`` by name, such as ``{"max_ctas": 8}``.
            timeout: seconds for all ranks to come.

        Raises:
            DeadlineError: the others did not come in time. ConfigError: a bad argument.
        """
        engine, ordinal = await asyncio.to_thread(_engines.resolve, device)
        return await cls._bring_up(engine, ordinal, size, rank, unique_id, config, timeout)

    @classmethod
    async def _bring_up(
        cls,
        engine: Any,
        ordinal: int,
        size: int,
        rank: int,
        unique_id: bytes,
        config: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> Communicator:
        if size < 1 or not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of {size} ranks does not exist")
        # The first use of a device makes its context, which takes a GPU some hundred
        # milliseconds.
        comm = await asyncio.to_thread(cls, engine, ordinal, rank, size)
        try:
            await comm._native_init(unique_id, config, timeout)
        except BaseException:
            # Off the loop and not waited for: whoever is inside the init comes out by the abort
            # flag.
            abort_all([comm], None, ABORT_BOUND)
            raise
        comm.spin_us = 0.0 if comm.shares_process else SPIN_US
        return comm

    @property
    def device(self) -> str:
        """The device, as array libraries spell it: ``"cuda:1"`` or ``"cpu"``."""
        return f"cuda:{self.device_ordinal}" if self.engine.is_cuda else "cpu"

    async def split(
        self,
        color: int | None,
        key: int = 0,
        *,
        config: Mapping[str, Any] | None = None,
        timeout: float | None = 60.0,
    ) -> Communicator | None:
        """Divide the ranks by colour (``ncclCommSplit``); every rank must call it.

        Args:
            color: ranks of one colour form a new communicator; None: this rank joins none.
            key: new ranks are numbered by key, ties by the old rank.
            config: as in ``create``; None takes over this communicator's.
            timeout: seconds for all ranks to come.

        Returns:
            The new communicator, or None for a rank without a colour.
        """
        if color == -1:
            raise ConfigError("color -1 is NCCL's word for no colour; pass None")
        child = type(self)(self.engine, self.device_ordinal)
        work = self._native_split(child, color, key, config, timeout)
        await work
        if not split_member(work):
            return None
        child.timeout = self.timeout
        child.spin_us = 0.0 if child.shares_process else SPIN_US
        return child

    def register(self, buffer: Any, *, timeout: float | None = 60.0) -> Registration:
        """Show NCCL a buffer, so that it can be used without a copy (``ncclCommRegister``).

        ``async with comm.register(x):``, or ``await`` it and ``close()`` it later. Local, and
        possible while operations run; useful where every rank registers its buffers. Memory of
        ``pynccl.empty`` is registered as a whole, once for all its slices and views.

        Args:
            buffer: an array on this communicator's device.
            timeout: seconds to wait for the calls before it.

        Raises:
            InvalidBufferError: no array that can be registered. NotSupportedError: NCCL is
            older than 2.19.
        """
        return Registration(self, buffer, timeout)

    def register_window(
        self, buffer: Any, *, strict_ordering: bool = False, timeout: float | None = 60.0
    ) -> Window:
        """Make a window of symmetric memory (``ncclCommWindowRegister``); all ranks call it.

        Every rank passes the same part of an allocation of the same size, made by
        ``pynccl.empty``; one that passes memory which it has a window of already gets the same
        window, so all of them must.

        Args:
            buffer: an array on this communicator's device.
            strict_ordering: NCCL_WIN_STRICT_ORDERING.
            timeout: seconds for all ranks to come.

        Raises:
            InvalidBufferError: the memory cannot be a window. NotSupportedError: when it is
            awaited: the system has no symmetric memory; at the call: NCCL is older than 2.27.
        """
        return Window(self, buffer, timeout, strict=strict_ordering)

    async def close(self, timeout: float | None = 30.0) -> None:
        """End the communicator with its peers (``ncclCommFinalize``, ``ncclCommDestroy``).

        What was issued is finished first. A communicator that has failed, or does not end in
        time, is aborted.

        Raises:
            DeadlineError: the peers did not close in time; the communicator was aborted.
        """
        if self.state in ("closed", "aborting"):
            return
        try:
            if self.state == "ready":
                self._closing = self._native_close(timeout)
                await self._closing
            elif self._closing is not None and self.state == "closing":
                await self._closing  # a second close() meanwhile
            else:
                await self.abort(CLOSE_GRACE)
        except NcclError:
            await self.abort(CLOSE_GRACE)
            raise
        finally:
            if self.state != "closing":
                self._closing = None  # it refers to us: the circle would wait for the collector
            await self._leave(polite=True)

    async def abort(self, timeout: float | None = 10.0) -> str:
        """End the communicator on this side alone (``ncclCommAbort``).

        Pending operations raise AbortedError at once; their arrays are held until the abort has
        returned.

        Args:
            timeout: seconds to wait for it; it goes on behind that.

        Returns:
            ``"clean"``, or ``"abandoned"`` if it has not returned in time: ``diagnostics()``
            counts what is left.
        """
        return await abort_together([self], timeout)

    async def _leave(self, *, polite: bool) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        if polite:
            await session.close()
        else:
            session.abandon()

    async def __aenter__(self) -> Communicator:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            await self.close()
        else:
            await self.abort(LEAVE_GRACE)

    def __repr__(self) -> str:
        return (
            f"<Communicator rank {self.rank} of {self.size} on {self.engine.name} device "
            f"{self.device_ordinal}, {self.state}>"
        )


async def abort_together(comms: Sequence[Communicator], timeout: float | None = 10.0) -> str:
    """Abort several communicators in one native group.

    One after another they could wait for each other.

    Returns:
        ``"clean"``, or ``"abandoned"`` if a handle had to be given up.
    """
    alive = [comm for comm in comms if comm.state not in ("closed", "aborting")]
    outcome = "clean"
    if alive:
        work = abort_all(list(alive), timeout, ABORT_BOUND)
        with contextlib.suppress(NcclError):
            await work
        if work.exception() is not None:
            outcome = "abandoned"
    for comm in comms:
        await comm._leave(polite=False)
    return outcome


async def create_all(
    devices: Sequence[str | int],
    *,
    config: Mapping[str, Any] | None = None,
    timeout: float | None = 60.0,
) -> list[Communicator]:
    """Make all ranks in this process, one communicator a device; rank i is on ``devices[i]``.

    Operations of such communicators go through native worker threads, so that one event loop
    can serve them all.

    Raises:
        ConfigError: no device, or a device of another engine.
    """
    if not devices:
        raise ConfigError("create_all needs at least one device")
    # A first use opens libraries and asks the driver: not on the loop.
    places = await asyncio.to_thread(lambda: [_engines.resolve(device) for device in devices])
    engine = places[0][0]
    if any(other is not engine for other, _ in places):
        raise ConfigError(f"all devices must be of one engine, not {list(devices)!r}")
    check_config(config)  # before an id is made, which nobody would use
    unique_id = await asyncio.to_thread(engine.unique_id)
    making = [
        asyncio.ensure_future(
            Communicator._bring_up(
                engine, ordinal, len(places), rank, unique_id, config, timeout
            )
        )
        for rank, (_, ordinal) in enumerate(places)
    ]
    try:
        done, _ = await asyncio.wait(making, return_when=asyncio.FIRST_EXCEPTION)
        # Where a rank gives up, another may find that it has: the deadline is what went wrong.
        for one in sorted(done, key=lambda one: not isinstance(one.exception(), DeadlineError)):
            one.result()  # raises what went wrong
        return [one.result() for one in making]
    except BaseException:
        # The others would wait for the one that failed until their deadline.
        for one in making:
            one.cancel()
        made = await asyncio.gather(*making, return_exceptions=True)
        comms = [one for one in made if isinstance(one, Communicator)]
        if comms:
            await abort_together(comms)
        raise


async def unique_id(device: str | int | None = None) -> bytes:
    """128 bytes that bring the ranks of one communicator together (``ncclGetUniqueId``).

    Make it on one rank, whose process must live until all are initialised, and hand it to the
    others.
    """
    made = await asyncio.to_thread(lambda: _engines.resolve(device)[0].unique_id())
    if len(made) != 128:
        raise UsageError(f"the engine gave a unique id of {len(made)} bytes")
    return bytes(made)
