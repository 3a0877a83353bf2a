"""Where rank 0's port is written down: a shared file, torchrun's store; and TLS on top."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from support.meeting import close, free_port, meet, outcomes, rank, run, tcp, until

from pynccl._bootstrap.address import Endpoint, File, Store, this_machine
from pynccl._bootstrap.boards import FileBoard
from pynccl._bootstrap.choice import board_for
from pynccl.errors import BootstrapError, ConfigError, DeadlineError

# file://


def test_a_file_brings_the_ranks_together_and_is_gone_afterwards(tmp_path: Path) -> None:
    async def main() -> None:
        await close(*await meet(4, f"file://{tmp_path}/meet"))

    run(main)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_private_and_whole_while_rank_0_waits(tmp_path: Path) -> None:
    path = tmp_path / "meet"

    async def main() -> None:
        zero = asyncio.ensure_future(rank(0, 2, f"file://{path}"))
        assert await until(path.exists)
        assert path.stat().st_mode & 0o777 == 0o600
        endpoint = Endpoint.load(path.read_bytes())
        assert endpoint is not None
        assert endpoint.machine == this_machine()
        zero.cancel()
        await outcomes(zero)

    run(main)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("leftover", ["dead", "alive", "torn"])
def test_what_an_earlier_attempt_left_is_not_believed(tmp_path: Path, leftover: str) -> None:
    """The old address leads nowhere, or to another attempt that lives, or is half written."""
    path = tmp_path / "meet"

    async def main() -> None:
        other_port = free_port()
        other = asyncio.ensure_future(rank(0, 2, tcp(other_port), timeout=5))
        await asyncio.sleep(0.05)
        port = other_port if leftover == "alive" else free_port()
        stale = Endpoint(("127.0.0.1",), port, b"s" * 16, this_machine()).dump()
        path.write_bytes(stale[: len(stale) // 2] if leftover == "torn" else stale)
        one = asyncio.ensure_future(rank(1, 2, f"file://{path}"))
        zero = asyncio.ensure_future(rank(0, 2, f"file://{path}", delay=0.4))
        await close(await zero, await one)
        other.cancel()
        await outcomes(other)

    run(main)


def test_a_rank_that_only_sees_a_stale_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "meet"

    async def main() -> None:
        port = free_port()
        other = asyncio.ensure_future(rank(0, 2, tcp(port), timeout=5))
        await asyncio.sleep(0.05)
        path.write_bytes(Endpoint(("127.0.0.1",), port, b"s" * 16, "elsewhere").dump())
        [error] = await outcomes(rank(1, 2, f"file://{path}", timeout=0.5))
        assert isinstance(error, DeadlineError)
        assert "the address is that of an earlier attempt" in str(error)
        other.cancel()
        await outcomes(other)

    run(main)


def test_rank_0_removes_no_file_but_its_own(tmp_path: Path) -> None:
    path = tmp_path / "meet"

    async def main() -> None:
        board = FileBoard(File(path))
        await board.post(4000, b"n" * 16)
        path.write_bytes(b"somebody else's")
        await board.clear()
        assert path.read_bytes() == b"somebody else's"

    run(main)


def test_a_directory_that_does_not_exist_is_an_error_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        start = time.monotonic()
        [error] = await outcomes(rank(0, 2, f"file://{tmp_path}/no/meet"))
        assert isinstance(error, BootstrapError)
        assert f"cannot write {tmp_path}/no/meet" in str(error)
        assert time.monotonic() - start < 1.0

    run(main)


# store://


class FakeStore:
    """The part of torch.distributed.TCPStore that is used; `tables` are the servers."""

    tables: ClassVar[dict[tuple[str, int], dict[str, bytes]]] = {}
    threads: ClassVar[set[int]] = set()

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: object = None,
        wait_for_workers: bool = True,
    ) -> None:
        assert not is_master
        assert not wait_for_workers
        if (host_name, port) not in self.tables:
            raise RuntimeError("The client socket has failed to connect")
        self._table = self.tables[host_name, port]

    def set(self, key: str, value: str) -> None:
        self.threads.add(threading.get_ident())
        self._table[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self.threads.add(threading.get_ident())
        return all(key in self._table for key in keys)

    def get(self, key: str) -> bytes:
        return self._table[key]

    def delete_key(self, key: str) -> bool:
        return self._table.pop(key, None) is not None


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The store of torchrun at agent:29400, as a dictionary."""
    module = types.ModuleType("torch.distributed")
    module.TCPStore = FakeStore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    FakeStore.tables[("agent", 29400)] = {}
    FakeStore.threads.clear()
    yield FakeStore.tables[("agent", 29400)]
    FakeStore.tables.clear()


def test_torchruns_store_carries_the_address_off_the_loop(table: dict[str, bytes]) -> None:
    async def main() -> None:
        stale = Endpoint(("127.0.0.1",), free_port(), b"s" * 16, "elsewhere").dump()
        table["pynccl/run-0"] = stale
        sessions = await asyncio.gather(
            *(rank(n, 3, "store://agent:29400/run-0", delay=0.2 * (n == 0)) for n in range(3))
        )
        assert table == {}
        await close(*sessions)
        assert threading.get_ident() not in FakeStore.threads
        assert FakeStore.threads

    run(main)


def test_a_store_that_cannot_be_reached_is_named(table: dict[str, bytes]) -> None:
    async def main() -> None:
        [error] = await outcomes(rank(1, 2, "store://elsewhere:29400/run-0", timeout=5))
        assert isinstance(error, BootstrapError)
        assert "torchrun's store at elsewhere port 29400" in str(error)

    run(main)


def test_without_torch_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)

    async def main() -> None:
        board = board_for(Store("agent", 29400, "run-0"), rank=1, size=2)
        with pytest.raises(ConfigError, match="give connect"):
            await board.look()

    run(main)


# TLS


@pytest.fixture(scope="module")
def contexts(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
    """Rank 0's context, one that trusts it, and one that does not."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    return server, trusting, ssl.create_default_context()


Contexts = tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]


def test_tls_carries_everything(contexts: Contexts) -> None:
    server, client, _ = contexts

    async def main() -> None:
        address = f"tcp://localhost:{free_port()}"
        sessions = await asyncio.gather(
            *(
                rank(n, 3, address, secret="w", context=client if n else server)
                for n in range(3)
            )
        )
        await asyncio.gather(*(session.report(True) for session in sessions))
        await close(*sessions)

    run(main)


def test_an_untrusted_certificate_fails_that_rank_at_once(contexts: Contexts) -> None:
    server, client, distrustful = contexts

    async def main() -> None:
        address = f"tcp://localhost:{free_port()}"
        zero = asyncio.ensure_future(rank(0, 2, address, context=server))
        start = time.monotonic()
        [error] = await outcomes(rank(1, 2, address, context=distrustful))
        assert isinstance(error, BootstrapError)
        assert "is not trusted" in str(error)
        assert time.monotonic() - start < 2.0
        await close(await rank(1, 2, address, context=client), await zero)

    run(main)


def test_a_plain_client_and_a_tls_server_do_not_meet(contexts: Contexts) -> None:
    server, client, _ = contexts

    async def main() -> None:
        address = f"tcp://localhost:{free_port()}"
        found = await outcomes(
            rank(0, 2, address, timeout=0.6, context=server), rank(1, 2, address, timeout=0.6)
        )
        assert [type(error) for error in found] == [DeadlineError] * 2
        found = await outcomes(
            rank(0, 2, address, timeout=0.6), rank(1, 2, address, timeout=0.6, context=client)
        )
        assert [type(error) for error in found] == [DeadlineError] * 2

    run(main)


def test_contexts_of_the_wrong_side_are_refused(contexts: Contexts) -> None:
    server, client, _ = contexts

    async def main() -> None:
        for number, context in ((0, client), (1, server)):
            with pytest.raises(ConfigError, match="rank 0 needs a server's context"):
                await rank(number, 2, tcp(4000), context=context)

    run(main)
