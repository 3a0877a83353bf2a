"""connect(): from a launcher's environment or an address to a communicator."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl as tls
from collections.abc import Generator, Mapping
from types import TracebackType
from typing import Any, NoReturn

from pynccl import _engines
from pynccl._communicator import Communicator
from pynccl.errors import PeerLostError


def connect(
    address: str = "env://",
    *,
    rank: int | None = None,
    size: int | None = None,
    device: str | int | None = None,
    config: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    secret: bytes | str | None = None,
    ssl: tls.SSLContext | None = None,
) -> Connecting:
    """Meet the other ranks and make a communicator of all of them.

    ``comm = await connect()`` or ``async with connect() as comm:``; the latter closes it at the
    end of the block, and aborts it if the block ends with an exception.

    Args:
        address: ``env://`` (torchrun's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; Open
            MPI's, MPICH's and Slurm's variables; alone where there are none),
            ``tcp://host:port``, ``file:///path`` or ``mpi://``. Rank 0 listens there.
        rank: this rank, where the environment does not say.
        size: how many ranks there are, where the environment does not say.
        device: ``"cuda:0"``, ``"cpu"``, ``"cpu:3"``, an ordinal of the default engine, or None:
            the GPU of the local rank where there is an NVIDIA driver, the CPU otherwise.
        config: settings of ``ncclConfig_t`` by name.
        timeout: seconds for everything together: meeting, and the native initialisation.
        secret: each side proves to the other that it knows it.
        ssl: a context for servers on rank 0, for clients elsewhere.

    Raises:
        ConfigError: a bad argument or environment. BootstrapError: the ranks do not fit
        together, or one of them failed. PeerLostError: one of them ended meanwhile;
        ``ranks`` names it. DeadlineError: not all of them came in time; ``missing`` names them.
    """
    return Connecting(address, rank, size, device, config, timeout, secret, ssl)


class Connecting:
    """What connect() returns: to be awaited, or entered with ``async with``."""

    def __init__(
        self,
        address: str,
        rank: int | None,
        size: int | None,
        device: str | int | None,
        config: Mapping[str, Any] | None,
        timeout: float,
        secret: bytes | str | None,
        ssl: tls.SSLContext | None,
    ) -> None:
        self._address = address
        self._rank = rank
        self._size = size
        self._device = device
        self._config = config
        self._timeout = timeout
        self._secret = secret
        self._ssl = ssl
        self._comm: Communicator | None = None

    def __await__(self) -> Generator[Any, Any, Communicator]:
        return self._open().__await__()

    async def __aenter__(self) -> Communicator:
        self._comm = await self._open()
        return await self._comm.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._comm is not None
        await self._comm.__aexit__(kind, error, trace)

    async def _open(self) -> Communicator:
        from pynccl import (
            _bootstrap,
        )  # costs an import of ssl and json: only for those who connect

        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout
        launch = await _bootstrap.locate(
            self._address, os.environ, rank=self._rank, size=self._size
        )
        # Opening a library and asking the driver may take its time: not on the loop.
        engine, ordinal = await asyncio.to_thread(
            _engines.resolve, self._device, launch.local_rank or 0
        )
        hello = await asyncio.to_thread(_hello, engine, ordinal)

        async def payload() -> bytes:
            return bytes(await asyncio.to_thread(engine.unique_id))

        session = await _bootstrap.join(
            launch.address,
            rank=launch.rank,
            size=launch.size,
            hello=hello,
            check=check_hellos,
            payload=payload,
            timeout=max(0.0, end - loop.time()),
            secret=self._secret,
            ssl=self._ssl,
        )
        try:
            comm = await self._initialise(session, engine, ordinal, max(0.0, end - loop.time()))
        except BaseException:
            session.abandon()
            raise
        comm._session = session
        return comm

    async def _initialise(
        self, session: Any, engine: Any, ordinal: int, left: float
    ) -> Communicator:
        """The native init, while the others tell whether theirs failed."""
        making = asyncio.ensure_future(
            Communicator._bring_up(
                engine, ordinal, session.size, session.rank, session.payload, self._config, left
            )
        )
        lost = asyncio.get_running_loop().create_future()

        def on_lost(ranks: tuple[int, ...], reason: str) -> None:
            if not lost.done():
                lost.set_result((ranks, reason))

        session.on_lost(on_lost)
        try:
            await asyncio.wait({making, lost}, return_when=asyncio.FIRST_COMPLETED)
            if making.done():
                comm = making.result()
                await session.report(ok=True, timeout=left if left > 0 else math.inf)
                return comm
            # Somebody failed or vanished: the init would wait for it until the deadline.
            return await _give_up(session, *lost.result())
        except BaseException as error:
            if making.done() and not making.cancelled() and making.exception() is None:
                await making.result().abort()
            else:
                making.cancel()
            if making.done() and making.exception() is error:
                await _tell(session, error)
            raise
        finally:
            lost.cancel()


async def _give_up(session: Any, ranks: tuple[int, ...], reason: str) -> NoReturn:
    """Let the others know that ranks were lost, and raise that."""
    await session.report(ok=False, message=f"lost {reason} before the end of init")
    raise PeerLostError(
        f"connect: lost {reason} before the communicator was initialised", ranks=ranks
    )


async def _tell(session: Any, error: BaseException) -> None:
    """Let the others know at once why this rank failed."""
    from pynccl.errors import NcclError

    try:
        await session.report(ok=False, message=str(error), timeout=1.0)
    except (NcclError, OSError):
        return  # it raises what it has just told


def _hello(engine: Any, ordinal: int) -> dict[str, str]:
    uuid, bus, name = engine.device_identity(ordinal)
    return {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "engine": engine.name,
        "device": f"{'cuda' if engine.is_cuda else 'cpu'}:{ordinal}",
        "uuid": uuid,
        "bus": bus,
        "gpu": name,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "nccl": str(engine.version),
        "library": engine.path("ncclGetVersion") or "",
        "shared_gpu": os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", ""),
    }


def check_hellos(hellos: list[dict[str, str]]) -> str | None:
    """What is wrong with a set of ranks, or None: mixed engines or versions, one GPU twice."""
    engines = {hello["engine"] for hello in hellos}
    if len(engines) > 1:
        return "the ranks use different engines: " + _table(hellos, "engine")
    releases = {int(hello["nccl"]) // 100 for hello in hellos}
    if len(releases) > 1:
        return "the ranks have different releases of NCCL: " + _table(hellos, "nccl", "library")
    if not hellos[0]["device"].startswith("cuda"):
        return None
    seen: dict[tuple[str, str], int] = {}
    for rank, hello in enumerate(hellos):
        if hello["shared_gpu"] == "1":
            continue
        place = (hello["host"], hello["uuid"])
        if place in seen:
            first = seen[place]
            return (
                f"ranks {first} and {rank} on {hello['host']} use the same GPU "
                f"({hello['gpu']}, bus {hello['bus']}), as {hellos[first]['device']} and "
                f"{hello['device']} with CUDA_VISIBLE_DEVICES {hellos[first]['visible']!r} and "
                f"{hello['visible']!r}; give each rank its own device= or set LOCAL_RANK"
            )
        seen[place] = rank
    return None


def _table(hellos: list[dict[str, str]], *names: str) -> str:
    return ", ".join(
        f"rank {rank}: {' '.join(hello[name] for name in names)}"
        for rank, hello in enumerate(hellos)
    )
