"""Frames on the wire: bytes to frames and back, with no I/O.

A frame is a 12-byte header and a body. The header holds a magic number, the version of this
protocol, the kind of the frame, two zero bytes and the length of the body, big endian.
Structured bodies are JSON, the others plain bytes; nothing that arrives is ever executed or
unpickled.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import dataclass
from typing import Any

MAGIC = b"pNCB"
VERSION = 1
HEADER = struct.Struct(">4sBBHI")

STRANGER_LIMIT = 1024
"""Largest body, in bytes, taken from a peer that has not proved itself yet."""
HELLO_LIMIT = 64 * 1024
"""Largest body, in bytes, that rank 0 takes from a proved peer."""
HUB_LIMIT = 256 * 1024 * 1024
"""Largest body, in bytes, that a peer takes from a proved rank 0 (it holds every hello)."""


class Kind(enum.IntEnum):
    """What a frame says, in about the order in which a connection sees them."""

    OPEN = 1
    CHALLENGE = 2
    PROOF = 3
    REFUSED = 4
    HELLO = 5
    NOTED = 6
    PEERS = 7
    START = 8
    REPORT = 9
    VERDICT = 10
    FAIL = 11
    LOST = 12
    ASK = 13
    ANSWER = 14
    ANSWERS = 15
    BYE = 16


class FrameError(Exception):
    """The bytes are not a frame of this protocol, or a body is not what its kind promises."""


@dataclass(frozen=True)
class Frame:
    """One message: its kind and its undecoded body."""

    kind: Kind
    body: bytes = b""

    def json(self) -> dict[str, Any]:
        """Decode the body as a JSON object; raise `FrameError` for anything else."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError) as exc:
            raise FrameError(f"the body of {self.kind.name} is not JSON") from exc
        if not isinstance(value, dict):
            raise FrameError(f"the body of {self.kind.name} is not a JSON object")
        return value


def encode(kind: Kind, body: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    return HEADER.pack(MAGIC, VERSION, kind, 0, len(body)) + body


def pack(value: dict[str, Any]) -> bytes:
    """Return `value` as the body of a JSON frame."""
    return json.dumps(value, separators=(",", ":")).encode()


class Decoder:
    """Cut a byte stream into frames.

    `limit` is the largest body taken, in bytes. It may be raised between two frames, which is
    how a stranger gets less of our memory than a peer that has proved itself.
    """

    def __init__(self, limit: int) -> None:
        """Start with an empty buffer."""
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Append bytes as they came from the network."""
        self._buffer += data

    def take(self) -> Frame | None:
        """Return the next whole frame, or None until more bytes come.

        Raises `FrameError` as soon as the first wrong byte of a header can be seen.
        """
        head = bytes(self._buffer[: len(MAGIC)])
        if head != MAGIC[: len(head)]:
            raise FrameError(f"not a pynccl frame: it starts with {head!r}")
        if len(self._buffer) < HEADER.size:
            return None
        _, version, number, zero, length = HEADER.unpack_from(self._buffer)
        if version != VERSION:
            raise FrameError(f"protocol version {version}, not {VERSION}")
        try:
            kind = Kind(number)
        except ValueError:
            raise FrameError(f"unknown kind of frame {number}") from None
        if zero:
            raise FrameError(f"reserved header bytes are {zero:#x}, not zero")
        if length > self.limit:
            raise FrameError(f"{kind.name} of {length} bytes, the limit is {self.limit}")
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return Frame(kind, body)
