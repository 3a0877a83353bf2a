"""Addresses: where the ranks of a job meet, as written by the user and as used on the wire."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from pynccl.errors import ConfigError

NONCE_BYTES = 16
FORMS = "env://, tcp://host:port, file:///path, mpi://"


@dataclass(frozen=True)
class Tcp:
    """A fixed port on rank 0's host. `room` names the job, so that two jobs cannot mix."""

    host: str
    port: int
    room: str = ""


@dataclass(frozen=True)
class File:
    """A file that every rank can read, in which rank 0 writes its port."""

    path: Path


@dataclass(frozen=True)
class Mpi:
    """mpi4py's COMM_WORLD carries rank 0's port."""


@dataclass(frozen=True)
class Store:
    """torchrun's own key-value store carries rank 0's port, under `key`."""

    host: str
    port: int
    key: str


Address = Tcp | File | Mpi | Store


def parse(address: str) -> Address:
    """Read an address; raise `ConfigError` that shows it and says what is wrong.

    `env://` is not an address but an order to ask the launcher: see `launcher.locate`.
    """
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as exc:
        raise ConfigError(f"address {address!r}: {exc}") from None
    if parts.scheme == "tcp":
        return Tcp(_host(address, parts), _port(address, port), unquote(parts.path.lstrip("/")))
    if parts.scheme == "store":
        key = unquote(parts.path.lstrip("/"))
        if not key:
            raise ConfigError(f"address {address!r}: no key after the port")
        return Store(_host(address, parts), _port(address, port), key)
    if parts.scheme == "file":
        if parts.netloc or len(parts.path) < 2:
            raise ConfigError(
                f"address {address!r}: a file needs an absolute path after three slashes, "
                "as in file:///scratch/job-17"
            )
        return File(Path(unquote(parts.path)))
    if parts.scheme == "mpi":
        if parts.netloc or parts.path:
            raise ConfigError(f"address {address!r}: mpi:// takes nothing after it")
        return Mpi()
    raise ConfigError(f"address {address!r} is none of {FORMS}")


def _host(address: str, parts: SplitResult) -> str:
    if not parts.hostname:
        raise ConfigError(f"address {address!r}: no host; expected {parts.scheme}://host:port")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"address {address!r}: only a host, a port and a name are allowed")
    return parts.hostname


def _port(address: str, port: int | None) -> int:
    if not port:
        raise ConfigError(
            f"address {address!r}: no port; every rank must know it before rank 0 listens, "
            "so 1 to 65535 (file:// and mpi:// find a free one)"
        )
    return port


def tcp_address(host: str, port: int, room: str = "", *, scheme: str = "tcp") -> str:
    """Write a `tcp://` address; IPv6 literals get their brackets."""
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{scheme}://{shown}:{port}" + (f"/{room}" if room else "")


@dataclass(frozen=True)
class Endpoint:
    """Where rank 0 listens.

    `hosts` are names or literals to try in turn; `nonce` is that of the attempt, empty where it
    cannot be known before rank 0 is reached; `machine` tells peers on rank 0's own host that
    the loopback will do.
    """

    hosts: tuple[str, ...]
    port: int
    nonce: bytes = b""
    machine: str = ""

    def dump(self) -> bytes:
        """Return the endpoint as JSON."""
        return json.dumps(
            {
                "pynccl": 1,
                "hosts": self.hosts,
                "port": self.port,
                "nonce": self.nonce.hex(),
                "machine": self.machine,
            }
        ).encode()

    @classmethod
    def load(cls, data: bytes) -> Endpoint | None:
        """Read `dump`'s bytes; None if they are something else (half written, not ours)."""
        try:
            value = json.loads(data)
            nonce = bytes.fromhex(value["nonce"])
            hosts = tuple(str(host) for host in value["hosts"])
            port = int(value["port"])
            machine = str(value["machine"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if len(nonce) != NONCE_BYTES or not hosts or not 0 < port < 65536:
            return None
        return cls(hosts, port, nonce, machine)

    def candidates(self) -> tuple[str, ...]:
        """Return the hosts to try, nearest first."""
        if self.machine and self.machine == this_machine():
            return ("127.0.0.1", *self.hosts)
        return self.hosts

    def __str__(self) -> str:
        """Return `host:port`, or `one|other:port`."""
        return f"{'|'.join(self.hosts)}:{self.port}"


def this_machine() -> str:
    """Return what tells this running machine from every other one."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}"


def own_hosts() -> tuple[str, ...]:
    """Return literals and the name under which other machines may reach this one.

    A connected datagram socket sends nothing but makes the kernel choose the source address of
    the default route. The name comes last: on many machines it resolves to a loopback address.
    """
    hosts: list[str] = []
    probes = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
    for family, outside in probes:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))
            hosts.append(probe.getsockname()[0])
    hosts.append(socket.gethostname())
    return tuple(dict.fromkeys(hosts))
