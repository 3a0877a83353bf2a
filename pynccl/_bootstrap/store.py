"""`store://`: torchrun's own key-value store carries rank 0's address to the others.

Under torchrun MASTER_PORT usually belongs to the agent's store
(TORCHELASTIC_USE_AGENT_STORE=True), so rank 0 cannot listen there. The key holds run id and
restart count, so that a restarted job does not read what its forerunner wrote.
"""

from __future__ import annotations

import contextlib
import importlib
from datetime import timedelta
from typing import Any

from pynccl._bootstrap.address import Endpoint, Store
from pynccl._bootstrap.boards import endpoint_here
from pynccl._bootstrap.waiting import off_loop
from pynccl.errors import BootstrapError, ConfigError

CALL_SECONDS = 10.0


class StoreBoard:
    """Rank 0 sets a key, the others poll it; each call on a thread of its own."""

    room = ""

    def __init__(self, address: Store) -> None:
        """Connect to nothing yet."""
        self._address = address
        self._key = f"pynccl/{address.key}"
        self._store: Any = None
        self._posted = False

    def listen_at(self) -> tuple[str | None, int]:
        """Any port will do."""
        return None, 0

    async def post(self, port: int, nonce: bytes) -> None:
        """Set the key."""
        value = (await endpoint_here(port, nonce)).dump()
        self._posted = True
        await off_loop(lambda: self._call("set", self._key, value.decode()))

    async def look(self) -> Endpoint | None:
        """Read the key if it is there."""
        value = await off_loop(self._read)
        return None if value is None else Endpoint.load(value)

    async def clear(self) -> None:
        """Remove the key."""
        if self._posted:
            with contextlib.suppress(BootstrapError):  # a store that is gone holds no key
                await off_loop(lambda: self._call("delete_key", self._key))
        self._store = None

    def _read(self) -> bytes | None:
        # check() first: get() waits in the library for a key that is not there
        if not self._call("check", [self._key]):
            return None
        value: bytes = self._call("get", self._key)
        return value

    def _call(self, method: str, *arguments: object) -> Any:
        if self._store is None:
            self._store = self._connect()
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as exc:
            raise BootstrapError(f"torchrun's store at {self._where()}: {exc}") from exc

    def _connect(self) -> Any:
        try:
            distributed = importlib.import_module("torch.distributed")
        except ImportError as exc:
            raise ConfigError(
                f"torchrun keeps MASTER_PORT for its own store, and torch is not usable here "
                f"({exc}): give connect() another address"
            ) from exc
        try:
            return distributed.TCPStore(
                self._address.host,
                self._address.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=CALL_SECONDS),
            )
        except RuntimeError as exc:
            raise BootstrapError(f"torchrun's store at {self._where()}: {exc}") from exc

    def _where(self) -> str:
        return f"{self._address.host} port {self._address.port}"
