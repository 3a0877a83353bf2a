"""`mpi://`: mpi4py carries rank 0's address to the others.

Three things go wrong with MPI elsewhere, and shape this module:

- A broadcast may be finished only by a later MPI call of its root, which has gone on to wait
  for something else. So nothing here is a broadcast: each rank asks, rank 0 answers, and rank 0
  keeps MPI going until every rank has come in over TCP, which proves more than a barrier would.
- An attempt that was given up must not shift the next one: collective calls match in order, for
  ever. Questions carry a ticket, and an answer to an old one is dropped.
- MPI wants all its calls from one thread. Where we initialise it, at MPI_THREAD_FUNNELED, that
  is one thread for the life of the process, which also finalises it. Where the program has, it
  is that thread if MPI_THREAD_MULTIPLE is provided, and the loop's own thread otherwise. No
  call blocks, except initialising and finalising.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from pynccl._bootstrap.address import Endpoint
from pynccl._bootstrap.boards import endpoint_here
from pynccl.errors import ConfigError

T = TypeVar("T")
Steps = Generator[None, None, T]

log = logging.getLogger("pynccl.bootstrap")

POLL_SECONDS = 0.001
FLUSH_SECONDS = 1.0
TAG_ASK, TAG_ANSWER = 1, 2
TICKET_BYTES = 16


class MpiBoard:
    """Rank 0 answers questions for its address while its attempt is gathering."""

    room = ""

    def __init__(self, *, rank: int, size: int) -> None:
        """Touch no MPI yet."""
        self._rank, self._size = rank, size
        self._stop = threading.Event()
        self._serving: asyncio.Future[None] | None = None

    def listen_at(self) -> tuple[str | None, int]:
        """Any port will do."""
        return None, 0

    async def post(self, port: int, nonce: bytes) -> None:
        """Start to answer."""
        answer = (await endpoint_here(port, nonce)).dump()
        await self._check_place()
        self._serving = asyncio.ensure_future(_run(lambda: self._serve(answer)))

    async def look(self) -> Endpoint | None:
        """Ask rank 0 and wait for its answer."""
        await self._check_place()
        return await _run(self._ask)

    async def clear(self) -> None:
        """Answer no more."""
        self._stop.set()
        if self._serving is not None:
            try:
                await self._serving
            except Exception:  # gathering is over, and says itself how it ended
                log.exception("answering over MPI failed")

    async def _check_place(self) -> None:
        rank, size = await place()
        if (rank, size) != (self._rank, self._size):
            raise ConfigError(
                f"MPI's COMM_WORLD says rank {rank} of {size}, "
                f"this rank was started as {self._rank} of {self._size}"
            )

    def _serve(self, answer: bytes) -> Steps[None]:
        mpi, comm = yield from _world()
        status = mpi.Status()
        sending: list[Any] = []
        while not self._stop.is_set():
            while comm.Iprobe(mpi.ANY_SOURCE, TAG_ASK, status):
                ticket = bytearray(TICKET_BYTES)
                comm.Recv([ticket, mpi.BYTE], status.Get_source(), TAG_ASK)
                reply = bytes(ticket) + answer
                request = comm.Isend([reply, mpi.BYTE], status.Get_source(), TAG_ANSWER)
                sending.append((request, reply))
            sending = [item for item in sending if not item[0].Test()]
            yield
        end = time.monotonic() + FLUSH_SECONDS
        while sending and time.monotonic() < end:
            sending = [item for item in sending if not item[0].Test()]
            yield
        _unfinished.extend(sending)

    def _ask(self) -> Steps[Endpoint | None]:
        mpi, comm = yield from _world()
        _unfinished[:] = [item for item in _unfinished if not item[0].Test()]
        ticket = secrets.token_bytes(TICKET_BYTES)
        asking = comm.Isend([ticket, mpi.BYTE], 0, TAG_ASK)
        status = mpi.Status()
        try:
            while True:
                if comm.Iprobe(0, TAG_ANSWER, status):
                    reply = bytearray(status.Get_count(mpi.BYTE))
                    comm.Recv([reply, mpi.BYTE], 0, TAG_ANSWER)
                    if reply.startswith(ticket):
                        return Endpoint.load(bytes(reply[TICKET_BYTES:]))
                yield
        finally:  # also when whoever waits has given up
            if not asking.Test():
                _unfinished.append((asking, ticket))


async def place() -> tuple[int, int]:
    """Return rank and size in MPI's COMM_WORLD, which initialises MPI if nothing has yet."""

    def ask() -> Steps[tuple[int, int]]:
        _, comm = yield from _world()
        return comm.Get_rank(), comm.Get_size()

    return await _run(ask)


# The process has one MPI, so this module has its state: it holds nothing of any attempt.

_unfinished: list[Any] = []
"""Sends that MPI may still read: (request, buffer)."""
_comm: Any = None
_duplicating: Any = None


def _world() -> Steps[tuple[Any, Any]]:
    """Our own copy of COMM_WORLD, made once: our messages cannot meet those of the program."""
    global _comm, _duplicating
    from mpi4py import MPI

    if _comm is None and _duplicating is None:
        _duplicating = MPI.COMM_WORLD.Idup()
    while _comm is None:
        comm, request = _duplicating
        if request.Test():
            _comm = comm
        else:
            yield
    return MPI, _comm


async def _run(steps: Callable[[], Steps[T]]) -> T:
    """Drive the steps on the thread that may call MPI."""
    if _must_stay_here():
        generator = steps()
        while True:
            try:
                next(generator)
            except StopIteration as stop:
                result: T = stop.value
                return result
            await asyncio.sleep(POLL_SECONDS)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    _thread.put(_Job(steps, loop, done))
    return await done


def _must_stay_here() -> bool:
    """Whether MPI was initialised by this thread for this thread only."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or _thread.owns_mpi or not module.Is_initialized():
        return False
    if module.Is_finalized():
        raise ConfigError("mpi:// cannot be used: MPI has been finalised")
    if module.Query_thread() == module.THREAD_MULTIPLE:
        return False
    if module.Is_thread_main():
        return True
    raise ConfigError(
        "mpi:// cannot be used: MPI was initialised by another thread, below "
        "MPI_THREAD_MULTIPLE; initialise it with MPI_THREAD_MULTIPLE, or not at all"
    )


class _Job:
    """Steps on their way through the MPI thread, and the future they end in."""

    def __init__(
        self,
        steps: Callable[[], Steps[Any]],
        loop: asyncio.AbstractEventLoop,
        done: asyncio.Future[Any],
    ) -> None:
        self._loop, self._done = loop, done
        self._steps = steps
        self._generator: Steps[Any] | None = None

    def advance(self) -> bool:
        """Take one step; return whether that was the last."""
        try:
            if self._generator is None:
                self._generator = self._steps()
            if self._done.cancelled():
                self._generator.close()
                return True
            next(self._generator)
        except StopIteration as stop:
            self._settle(stop.value, None)
        except BaseException as exc:  # carried to the loop, whatever it is
            self._settle(None, exc)
        else:
            return False
        return True

    def _settle(self, value: object, error: BaseException | None) -> None:
        def on_loop() -> None:
            if self._done.done():
                return
            if error is None:
                self._done.set_result(value)
            else:
                self._done.set_exception(error)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(on_loop)

    def refuse(self, error: BaseException) -> None:
        """End without a step."""
        self._settle(None, error)


class _MpiThread:
    """The one thread that calls MPI; it takes turns, so no job waits for another."""

    def __init__(self) -> None:
        self.owns_mpi = False
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started = False
        self._finalized = threading.Event()

    def put(self, job: _Job) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=self._main, name="pynccl-mpi", daemon=True).start()
        self._queue.put(job)

    def _main(self) -> None:
        failure = self._initialize()
        jobs: list[_Job] = []
        while True:
            try:
                job = self._queue.get(timeout=POLL_SECONDS) if jobs else self._queue.get()
            except queue.Empty:
                pass
            else:
                if job is None:
                    break
                if failure is not None:
                    job.refuse(failure)
                    continue
                jobs.append(job)
            jobs = [job for job in jobs if not job.advance()]
        sys.modules["mpi4py.MPI"].Finalize()
        self._finalized.set()

    def _initialize(self) -> Exception | None:
        try:
            import mpi4py

            if "mpi4py.MPI" not in sys.modules:
                mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as exc:  # RuntimeError: no MPI library was found
            return ConfigError(
                f"the launcher is MPI's, and mpi4py is not usable here ({exc}): "
                "pip install 'pynccl-aio[mpi]', or set MASTER_ADDR and MASTER_PORT"
            )
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_FUNNELED)
            self.owns_mpi = True
            atexit.register(self._finalize)
        return None

    def _finalize(self) -> None:
        # MPI's processes leave together: one that is gone without MPI_Finalize is an error to
        # mpiexec, which then ends the others. So this waits, as MPI_Finalize at exit always
        # does.
        if not sys.modules["mpi4py.MPI"].Is_finalized():
            self._queue.put(None)
            self._finalized.wait()


_thread = _MpiThread()
