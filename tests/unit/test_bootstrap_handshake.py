"""The handshake, without sockets: who passes, who is refused, and what is never given away."""

from __future__ import annotations

import pytest

from pynccl._bootstrap.frames import Frame, FrameError, Kind
from pynccl._bootstrap.handshake import (
    ROOM,
    SECRET,
    STALE,
    Caller,
    Doorkeeper,
    Refused,
    make_key,
)
from pynccl.errors import ConfigError

NONCE = b"n" * 16


def caller(key: bytes = b"", room: str = "", expected: bytes = b"") -> Caller:
    return Caller(key=key, room=room, expected=expected, rank=3)


def keeper(key: bytes = b"", room: str = "", nonce: bytes = NONCE) -> Doorkeeper:
    return Doorkeeper(key=key, room=room, nonce=nonce)


def shake(client: Caller, server: Doorkeeper) -> None:
    """Carry the frames to and fro."""
    kind, challenge = server.answer(Frame(Kind.OPEN, client.open()))
    proof = client.prove(Frame(kind, challenge))
    client.verify(Frame(*server.answer(Frame(Kind.PROOF, proof))))


@pytest.mark.parametrize("secret", [None, "word", b"\x00\xff"])
@pytest.mark.parametrize("expected", [b"", NONCE])
def test_two_that_agree_pass_and_know_the_nonce(
    secret: str | bytes | None, expected: bytes
) -> None:
    client, server = caller(make_key(secret), "job", expected), keeper(make_key(secret), "job")
    shake(client, server)
    assert server.passed
    assert server.claimed == 3
    assert client.nonce == NONCE


@pytest.mark.parametrize(
    ("client", "server", "why"),
    [
        (caller(b"a"), keeper(b"b"), SECRET),
        (caller(b"a"), keeper(), SECRET),
        (caller(), keeper(b"a"), SECRET),
        (caller(room="x"), keeper(room="y"), ROOM),
        (caller(expected=b"m" * 16), keeper(), STALE),
    ],
    ids=["other secret", "no secret at rank 0", "no secret here", "other job", "other attempt"],
)
def test_two_that_disagree_do_not_pass(client: Caller, server: Doorkeeper, why: str) -> None:
    with pytest.raises(Refused) as caught:
        shake(client, server)
    assert caught.value.why == why
    assert not server.passed
    assert Refused.read(Frame(Kind.REFUSED, caught.value.body())).why == why


def test_the_client_finds_out_a_rank_0_that_does_not_know_the_secret() -> None:
    client, impostor = caller(b"word"), keeper(b"guess")
    _, challenge = impostor.answer(Frame(Kind.OPEN, client.open()))
    client.prove(Frame(Kind.CHALLENGE, challenge))
    with pytest.raises(Refused, match="does not know the secret"):
        client.verify(Frame(Kind.PROOF, bytes(32)))


def test_a_proof_cannot_be_reflected_or_replayed() -> None:
    client, server = caller(b"word"), keeper(b"word")
    _, challenge = server.answer(Frame(Kind.OPEN, client.open()))
    proof = client.prove(Frame(Kind.CHALLENGE, challenge))
    with pytest.raises(Refused):
        client.verify(Frame(Kind.PROOF, proof))
    again = keeper(b"word")
    again.answer(Frame(Kind.OPEN, client.open()))
    with pytest.raises(Refused):
        again.answer(Frame(Kind.PROOF, proof))


def test_rank_0_notices_another_nonce_even_if_the_client_does_not() -> None:
    client, first, second = caller(), keeper(), keeper(nonce=b"o" * 16)
    _, challenge = first.answer(Frame(Kind.OPEN, client.open()))
    second.answer(Frame(Kind.OPEN, client.open()))
    with pytest.raises(Refused):
        second.answer(Frame(Kind.PROOF, client.prove(Frame(Kind.CHALLENGE, challenge))))


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.PROOF, bytes(32)),
        Frame(Kind.HELLO, b"{}"),
        Frame(Kind.OPEN, b""),
        Frame(Kind.OPEN, bytes(1000)),
    ],
)
def test_rank_0_takes_nothing_out_of_turn(frame: Frame) -> None:
    with pytest.raises(FrameError):
        keeper().answer(frame)


def test_an_empty_secret_is_an_error_rather_than_none() -> None:
    with pytest.raises(ConfigError, match="secret is empty"):
        make_key("")
