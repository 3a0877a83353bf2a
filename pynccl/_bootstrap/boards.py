"""Notice boards: how rank 0's port becomes known to the others.

Rank 0 posts an `Endpoint`, the others look until it is there and a connection to it works.
What they see may be left over from an attempt that died: its nonce gives it away, so they look
again.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from typing import Protocol

from pynccl._bootstrap.address import (
    Endpoint,
    File,
    Tcp,
    own_hosts,
    this_machine,
)
from pynccl._bootstrap.waiting import off_loop
from pynccl.errors import BootstrapError


class Board(Protocol):
    """Where rank 0 says how it can be reached."""

    room: str
    """Name of the job, compared in the handshake."""

    def listen_at(self) -> tuple[str | None, int]:
        """Return host and port for rank 0 to bind: None is every interface, 0 any free port."""

    async def post(self, port: int, nonce: bytes) -> None:
        """Rank 0: make known where it listens, and the nonce of the attempt."""

    async def look(self) -> Endpoint | None:
        """Others: return what is known now, None if nothing is."""

    async def clear(self) -> None:
        """All ranks, at the end of gathering, however it ended: leave nothing behind."""


class FixedBoard:
    """`tcp://`: everybody knows host and port beforehand."""

    def __init__(self, address: Tcp) -> None:
        """Take the address as it is."""
        self.room = address.room
        self._address = address

    def listen_at(self) -> tuple[str | None, int]:
        """Return the fixed host and port."""
        return self._address.host, self._address.port

    async def post(self, port: int, nonce: bytes) -> None:
        """Do nothing: it is known."""

    async def look(self) -> Endpoint | None:
        """Return the fixed host and port, without a nonce."""
        return Endpoint((self._address.host,), self._address.port)

    async def clear(self) -> None:
        """Do nothing."""


class FileBoard:
    """`file://`: a file on a file system that all ranks share."""

    room = ""

    def __init__(self, address: File) -> None:
        """Touch nothing yet."""
        self._path = address.path
        self._posted = b""

    def listen_at(self) -> tuple[str | None, int]:
        """Any port will do."""
        return None, 0

    async def post(self, port: int, nonce: bytes) -> None:
        """Write the file in one step: a reader sees the old one, or the whole new one."""
        self._posted = (await endpoint_here(port, nonce)).dump()
        try:
            await off_loop(self._write)
        except OSError as exc:
            raise BootstrapError(
                f"rank 0 cannot write {self._path}: {exc.strerror or exc}"
            ) from exc

    async def look(self) -> Endpoint | None:
        """Read the file."""
        try:
            data = await off_loop(self._path.read_bytes)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno == errno.ESTALE:  # NFS: rank 0 has just replaced the file
                return None
            raise BootstrapError(f"cannot read {self._path}: {exc.strerror or exc}") from exc
        return Endpoint.load(data)

    async def clear(self) -> None:
        """Remove the file, unless another attempt has replaced it."""
        if self._posted:
            await off_loop(self._remove)

    def _write(self) -> None:
        draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        try:
            draft.touch(0o600, exist_ok=False)
            draft.write_bytes(self._posted)
            draft.replace(self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            if self._path.read_bytes() == self._posted:
                self._path.unlink()


async def endpoint_here(port: int, nonce: bytes) -> Endpoint:
    """Return rank 0's endpoint with all the names it may be reached by."""
    hosts, machine = await off_loop(lambda: (own_hosts(), this_machine()))
    return Endpoint(hosts, port, nonce, machine)
