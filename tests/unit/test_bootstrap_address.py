"""Addresses: what is understood, what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from pynccl._bootstrap.address import (
    Endpoint,
    File,
    Mpi,
    Store,
    Tcp,
    own_hosts,
    parse,
    tcp_address,
    this_machine,
)
from pynccl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("tcp://node1:29500", Tcp("node1", 29500)),
        ("tcp://10.0.0.1:1", Tcp("10.0.0.1", 1)),
        ("tcp://[fe80::1]:65535", Tcp("fe80::1", 65535)),
        ("tcp://node1:29500/job-7", Tcp("node1", 29500, "job-7")),
        ("file:///scratch/a%20b", File(Path("/scratch/a b"))),
        ("mpi://", Mpi()),
        ("store://node1:29400/run-0", Store("node1", 29400, "run-0")),
    ],
)
def test_parse(text: str, meaning: object) -> None:
    assert parse(text) == meaning


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "none of env://"),
        ("node1:29500", "none of env://"),
        ("http://node1:29500", "none of env://"),
        ("tcp://node1", "no port"),
        ("tcp://node1:0", "no port"),
        ("tcp://:29500", "no host"),
        ("tcp://node1:65536", "65536|out of range"),
        ("tcp://node1:port", "port"),
        ("tcp://me@node1:29500", "only a host"),
        ("tcp://node1:29500/?x=1", "only a host"),
        ("file://scratch/x", "three slashes"),
        ("file:///", "three slashes"),
        ("mpi://world", "takes nothing"),
        ("store://node1:29400", "no key"),
    ],
)
def test_what_is_no_address_is_shown_in_the_error(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("host", ["node1", "10.0.0.1", "fe80::1"])
def test_tcp_address_is_read_back(host: str) -> None:
    assert parse(tcp_address(host, 29500, "room")) == Tcp(host, 29500, "room")


def test_an_endpoint_is_read_back_and_the_nearest_host_comes_first() -> None:
    here = Endpoint(("10.0.0.1", "node1"), 4000, b"n" * 16, this_machine())
    assert Endpoint.load(here.dump()) == here
    assert here.candidates() == ("127.0.0.1", "10.0.0.1", "node1")
    elsewhere = Endpoint(("10.0.0.1",), 4000, b"n" * 16, "another machine")
    assert elsewhere.candidates() == ("10.0.0.1",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"hosts": []}',
        b'{"hosts": ["a"], "port": 1, "nonce": "00", "machine": ""}',
        b'{"hosts": ["a"], "port": 0, "nonce": "' + b"00" * 16 + b'", "machine": ""}',
    ],
)
def test_what_is_no_endpoint_is_none(data: bytes) -> None:
    assert Endpoint.load(data) is None


def test_this_host_has_a_name_to_be_reached_by() -> None:
    assert own_hosts()
    assert all(own_hosts())
