"""A TCP proxy that spoils the connections which run through it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from types import TracebackType


@dataclass
class Faults:
    """What happens to each direction of a connection.

    `piece` bytes are forwarded at a time, each after `delay` seconds. After `cut_up` bytes
    towards the server, or `cut_down` bytes towards the client, both sides are reset. If
    `stalled`, nothing is forwarded and nothing is closed, as with a cable that was pulled.
    """

    piece: int = 65536
    delay: float = 0.0
    cut_up: int | None = None
    cut_down: int | None = None
    stalled: bool = False


class Proxy:
    """Listen on `port` and forward to `target`, a port of this host.

    The first connections get the faults of `plan`, one each; all later ones get `faults`.
    """

    def __init__(self, target: int, faults: Faults | None = None, *plan: Faults) -> None:
        self.target = target
        self.faults = faults or Faults()
        self.plan = list(plan)
        self.port = 0
        self.accepted = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        faults = self.plan.pop(0) if self.plan else self.faults
        self._writers.add(writer)
        task = asyncio.ensure_future(self._forward(reader, writer, faults))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults
    ) -> None:
        ways: set[asyncio.Future[None]] = set()
        try:
            there_reader, there = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(there)
            ways = {
                asyncio.ensure_future(_pump(reader, there, faults, faults.cut_up)),
                asyncio.ensure_future(_pump(there_reader, writer, faults, faults.cut_down)),
            }
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            there.transport.abort()
        except OSError:
            pass  # nobody listens at the target: the caller sees its connection reset
        finally:
            writer.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)


async def _pump(
    source: asyncio.StreamReader,
    sink: asyncio.StreamWriter,
    faults: Faults,
    cut_after: int | None,
) -> None:
    passed = 0
    with contextlib.suppress(OSError):
        while data := await source.read(faults.piece):
            if faults.stalled:
                await asyncio.Event().wait()
            if faults.delay:
                await asyncio.sleep(faults.delay)
            if cut_after is not None:
                data = data[: cut_after - passed]
            sink.write(data)
            await sink.drain()
            passed += len(data)
            if cut_after is not None and passed >= cut_after:
                return
