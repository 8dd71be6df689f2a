"""ttrpc over any split of the stream, and any bytes at all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kata_pin.peers import ttrpc
from kata_pin.peers.ttrpc import Frame, FrameDecoder, Response, TtrpcRequest

texts = st.text(max_size=30)
requests = st.builds(
    TtrpcRequest,
    service=texts,
    method=texts,
    payload=st.binary(max_size=200),
    timeout_ns=st.integers(0, (1 << 63) - 1),
)
responses = st.builds(
    Response,
    payload=st.binary(max_size=200),
    code=st.integers(1, 16),
    message=texts,
)
streams = st.integers(0, (1 << 32) - 1)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut data at these places, wherever they are."""
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(streams, requests)
def test_requests_survive(stream: int, request: TtrpcRequest) -> None:
    """What is called is what is read."""
    (frame,) = FrameDecoder().feed(ttrpc.encode_request(stream, request))
    assert (frame.stream, frame.kind) == (stream, ttrpc.REQUEST)
    assert frame.data is not None
    assert ttrpc.parse_request(frame.data) == request


@given(streams, responses)
def test_responses_survive(stream: int, response: Response) -> None:
    """What is answered is what is read."""
    (frame,) = FrameDecoder().feed(ttrpc.encode_response(stream, response))
    assert frame.data is not None
    assert ttrpc.parse_response(frame.data) == response


@given(st.lists(st.tuples(streams, requests), max_size=5), st.lists(st.integers(0, 2000)))
def test_any_split(calls: list[tuple[int, TtrpcRequest]], cuts: list[int]) -> None:
    """Frames come out whole and in order, however the stream is cut."""
    data = b"".join(ttrpc.encode_request(*call) for call in calls)
    decoder = FrameDecoder()
    found = [frame for piece in pieces(data, cuts) for frame in decoder.feed(piece)]
    assert [(f.stream, ttrpc.parse_request(f.data or b"")) for f in found] == calls


@given(
    st.integers(ttrpc.MAX_DATA + 1, ttrpc.MAX_DATA + 3000),
    streams,
    st.lists(st.integers(0, ttrpc.MAX_DATA + 4000), max_size=8),
)
def test_too_long_over_any_split(length: int, stream: int, cuts: list[int]) -> None:
    """A frame that is too long is yielded once and skipped exactly, however it is cut."""
    after = ttrpc.encode_response(1, Response(b"after"))
    data = ttrpc.HEADER.pack(length, stream, ttrpc.REQUEST, 0) + bytes(length) + after
    decoder = FrameDecoder()
    found = [frame for piece in pieces(data, cuts) for frame in decoder.feed(piece)]
    assert found[0] == Frame(stream, ttrpc.REQUEST, None)
    assert [frame.kind for frame in found[1:]] == [ttrpc.RESPONSE]
