"""Frames: any cut of the stream gives the same frames; anything else is refused early."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pynccl._bootstrap.frames import HEADER, MAGIC, VERSION, Decoder, FrameError, Kind, encode
from pynccl._bootstrap.frames import Frame as F

frames = st.lists(st.builds(F, st.sampled_from(Kind), st.binary(max_size=200)), max_size=8)


def drain(decoder: Decoder) -> list[F]:
    found = []
    while (frame := decoder.take()) is not None:
        found.append(frame)
    return found


@given(frames, st.lists(st.integers(1, 50)))
def test_any_cut_of_the_stream_gives_the_same_frames(sent: list[F], cuts: list[int]) -> None:
    stream = b"".join(encode(frame.kind, frame.body) for frame in sent)
    decoder, found = Decoder(limit=200), []
    for size in [*cuts, len(stream)]:
        piece, stream = stream[:size], stream[size:]
        decoder.feed(piece)
        found += drain(decoder)
    assert found == sent


@given(st.binary(min_size=1))
def test_bytes_that_do_not_start_like_a_frame_are_refused_at_once(junk: bytes) -> None:
    decoder = Decoder(limit=100)
    decoder.feed(junk)
    if MAGIC.startswith(junk[: len(MAGIC)]):
        return
    with pytest.raises(FrameError, match="not a pynccl frame"):
        decoder.take()


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (HEADER.pack(MAGIC, VERSION + 1, Kind.OPEN, 0, 0), "version 2, not 1"),
        (HEADER.pack(MAGIC, VERSION, 200, 0, 0), "unknown kind of frame 200"),
        (HEADER.pack(MAGIC, VERSION, Kind.OPEN, 7, 0), "reserved header bytes"),
        (HEADER.pack(MAGIC, VERSION, Kind.OPEN, 0, 101), "OPEN of 101 bytes, the limit is 100"),
        (HEADER.pack(MAGIC, VERSION, Kind.OPEN, 0, 2**32 - 1), "the limit is 100"),
    ],
)
def test_a_wrong_header_is_refused_before_its_body_comes(header: bytes, complaint: str) -> None:
    decoder = Decoder(limit=100)
    decoder.feed(header)
    with pytest.raises(FrameError, match=complaint):
        decoder.take()


def test_the_limit_can_be_raised_between_two_frames() -> None:
    decoder = Decoder(limit=4)
    decoder.feed(encode(Kind.PROOF, b"1234") + encode(Kind.HELLO, b"12345"))
    assert decoder.take() == F(Kind.PROOF, b"1234")
    decoder.limit = 5
    assert decoder.take() == F(Kind.HELLO, b"12345")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"7", b"\xff\xfe\xfa", b"[" * 60_000])
def test_a_body_that_is_no_json_object_is_a_frame_error(body: bytes) -> None:
    with pytest.raises(FrameError, match="HELLO is not"):
        F(Kind.HELLO, body).json()
