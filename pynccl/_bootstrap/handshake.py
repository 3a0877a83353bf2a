"""Who is there: both ends prove that they know the secret and mean the same attempt. No I/O.

    client -> OPEN       room, client's random bytes, nonce it expects (or none), its rank
    rank 0 -> CHALLENGE  nonce of the attempt, rank 0's random bytes
    client -> PROOF      HMAC-SHA256 over "client", OPEN and CHALLENGE
    rank 0 -> PROOF      HMAC-SHA256 over "rank 0", OPEN and CHALLENGE

The client proves first, so that a stranger who connects learns nothing he could guess the
secret from. Without a secret the key is empty: the exchange then still binds both ends to one
room and one nonce. A proof vouches for the peer when it connects; against somebody who can
change bytes on the way, use TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from pynccl._bootstrap.address import NONCE_BYTES
from pynccl._bootstrap.frames import Frame, FrameError, Kind, pack
from pynccl.errors import ConfigError

_OPEN = struct.Struct(f">?I16s{NONCE_BYTES}s32s")
_CHALLENGE = struct.Struct(f">?{NONCE_BYTES}s32s")
_ANY = bytes(NONCE_BYTES)

ROOM, STALE, SECRET = "room", "stale", "secret"


class Refused(Exception):  # an answer of the protocol, not something users see
    """The other end is not the one that is looked for; `why` is ROOM, STALE or SECRET."""

    def __init__(self, why: str, text: str) -> None:
        """Keep the reason, and the sentence that tells it."""
        super().__init__(text)
        self.why = why
        self.text = text

    def body(self) -> bytes:
        """Return the body of the REFUSED frame that tells the other end."""
        return pack({"why": self.why, "text": self.text})

    @classmethod
    def read(cls, frame: Frame) -> Refused:
        """Make the exception of a REFUSED frame."""
        value = frame.json()
        return cls(str(value.get("why", "")), str(value.get("text", "no reason given")))


def make_key(secret: bytes | str | None) -> bytes:
    """Return the HMAC key of a secret, b"" without one; raise `ConfigError` if it is empty."""
    if secret is None:
        return b""
    raw = secret.encode() if isinstance(secret, str) else bytes(secret)
    if not raw:
        raise ConfigError("secret is empty; give None for no secret")
    return raw


def _proof(key: bytes, side: bytes, opening: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, side + opening + challenge, "sha256")


def _room(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:16]


class Caller:
    """The client's side of one handshake; `expected` is the nonce it must find, b"" for any."""

    def __init__(self, *, key: bytes, room: str, expected: bytes, rank: int) -> None:
        """Draw the random bytes of this connection."""
        self._key = key
        self._expected = expected
        self._opening = _OPEN.pack(
            bool(key), rank, _room(room), expected or _ANY, secrets.token_bytes(32)
        )
        self._challenge = b""
        self.nonce = b""

    def open(self) -> bytes:
        """Return the body of OPEN."""
        return self._opening

    def prove(self, frame: Frame) -> bytes:
        """Take CHALLENGE, return the body of PROOF; raise `Refused` or `FrameError`."""
        self._must_be(frame, Kind.CHALLENGE, _CHALLENGE.size)
        has_secret, nonce, _ = _CHALLENGE.unpack(frame.body)
        if self._expected and nonce != self._expected:
            raise Refused(STALE, "another attempt listens there")
        if has_secret != bool(self._key):
            raise Refused(SECRET, _uneven(has_secret))
        self._challenge = frame.body
        self.nonce = nonce
        return _proof(self._key, b"client", self._opening, frame.body)

    def verify(self, frame: Frame) -> None:
        """Check rank 0's PROOF; raise `Refused` or `FrameError`."""
        self._must_be(frame, Kind.PROOF, 32)
        wanted = _proof(self._key, b"rank 0", self._opening, self._challenge)
        if not hmac.compare_digest(wanted, frame.body):
            raise Refused(SECRET, "the program that listens there does not know the secret")

    @staticmethod
    def _must_be(frame: Frame, kind: Kind, size: int) -> None:
        if frame.kind is Kind.REFUSED:
            raise Refused.read(frame)
        if frame.kind is not kind or len(frame.body) != size:
            raise FrameError(f"{frame.kind.name} of {len(frame.body)} bytes, not {kind.name}")


class Doorkeeper:
    """Rank 0's side of one handshake. `claimed` is the rank the caller says it has."""

    def __init__(self, *, key: bytes, room: str, nonce: bytes) -> None:
        """Expect OPEN."""
        self._key = key
        self._room = _room(room)
        self._nonce = nonce
        self._opening = b""
        self._challenge = b""
        self.claimed: int | None = None
        self.passed = False

    def answer(self, frame: Frame) -> tuple[Kind, bytes]:
        """Take the next frame, return the one to send; raise `Refused` or `FrameError`."""
        if frame.kind is Kind.OPEN and not self._opening:
            return Kind.CHALLENGE, self._challenged(frame.body)
        if frame.kind is Kind.PROOF and self._challenge and not self.passed:
            wanted = _proof(self._key, b"client", self._opening, self._challenge)
            if not hmac.compare_digest(wanted, frame.body):
                raise Refused(SECRET, "wrong secret")
            self.passed = True
            return Kind.PROOF, _proof(self._key, b"rank 0", self._opening, self._challenge)
        raise FrameError(f"{frame.kind.name} out of turn")

    def _challenged(self, opening: bytes) -> bytes:
        if len(opening) != _OPEN.size:
            raise FrameError(f"OPEN of {len(opening)} bytes, not {_OPEN.size}")
        has_secret, self.claimed, room, expected, _ = _OPEN.unpack(opening)
        if room != self._room:
            raise Refused(ROOM, "the port serves another job")
        if expected not in (_ANY, self._nonce):
            raise Refused(STALE, "the address is that of an earlier attempt")
        if has_secret != bool(self._key):
            raise Refused(SECRET, _uneven(bool(self._key)))
        self._opening = opening
        self._challenge = _CHALLENGE.pack(bool(self._key), self._nonce, secrets.token_bytes(32))
        return self._challenge


def _uneven(rank_0_has: bool) -> str:
    if rank_0_has:
        return "rank 0 asks for a secret and this rank has none"
    return "this rank has a secret and rank 0 has none"
