"""ttrpc's frames and envelopes: byte vectors, bounds, and frames that are too long."""

from __future__ import annotations

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.peers import ttrpc
from kata_pin.peers.ttrpc import Code, Frame, FrameDecoder, Response, TtrpcRequest

VECTORS = [
    (Response(bytes.fromhex("10e70e")), 1, "00000005000000010200120310e70e"),
    (Response(), 3, "00000000000000030200"),
    (
        Response(b"", Code.UNIMPLEMENTED, "method X"),
        5,
        "0000000e0000000502000a0c080c12086d6574686f642058",
    ),
]
"""Computed from the protocol's description with another encoder."""


@pytest.mark.parametrize(("response", "stream", "hexadecimal"), VECTORS)
def test_responses_as_bytes(response: Response, stream: int, hexadecimal: str) -> None:
    """A response is exactly these bytes; success with an empty message is an empty frame."""
    data = bytes.fromhex(hexadecimal)
    assert ttrpc.encode_response(stream, response) == data
    (frame,) = FrameDecoder().feed(data)
    assert (frame.stream, frame.kind) == (stream, ttrpc.RESPONSE)
    assert frame.data is not None
    assert ttrpc.parse_response(frame.data) == response


def test_a_request_survives() -> None:
    """What is called is what is read, with its timeout."""
    request = TtrpcRequest("a.B", "Do", b"\x00payload", timeout_ns=5_000_000_000)
    (frame,) = FrameDecoder().feed(ttrpc.encode_request(7, request))
    assert (frame.stream, frame.kind) == (7, ttrpc.REQUEST)
    assert frame.data is not None
    assert ttrpc.parse_request(frame.data) == request


def test_a_frame_that_is_too_long_is_skipped() -> None:
    """Its data is dropped as it comes, the frame is yielded at once, and the next one is read."""
    decoder = FrameDecoder()
    header = ttrpc.HEADER.pack(ttrpc.MAX_DATA + 1, 9, ttrpc.REQUEST, 0)
    assert list(decoder.feed(header + b"x" * 100)) == [Frame(9, ttrpc.REQUEST, None)]
    rest = ttrpc.MAX_DATA + 1 - 100
    found: list[Frame] = []
    after = ttrpc.encode_response(11, Response(b"y"))
    while rest:
        piece = min(rest, 1 << 20)
        rest -= piece
        found = list(decoder.feed(b"x" * piece + (b"" if rest else after)))
    assert [(frame.stream, frame.kind) for frame in found] == [(11, ttrpc.RESPONSE)]


def test_the_longest_frame_is_taken() -> None:
    """Exactly MAX_DATA bytes of data are a frame."""
    data = ttrpc.HEADER.pack(ttrpc.MAX_DATA, 1, ttrpc.RESPONSE, 0) + b"z" * ttrpc.MAX_DATA
    (frame,) = FrameDecoder().feed(data)
    assert frame.data is not None
    assert len(frame.data) == ttrpc.MAX_DATA


def test_what_does_not_fit_is_not_sent() -> None:
    """A message beyond the bound is our own mistake, and never reaches the peer."""
    with pytest.raises(ValueError, match="do not fit"):
        ttrpc.encode_response(1, Response(b"x" * ttrpc.MAX_DATA))


@pytest.mark.parametrize("parse", [ttrpc.parse_request, ttrpc.parse_response])
def test_broken_envelopes(parse: object) -> None:
    """Bytes that are no message are a ParseError."""
    assert callable(parse)
    with pytest.raises(ParseError, match="ttrpc"):
        parse(b"\x0a\xff")
