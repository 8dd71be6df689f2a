"""Frames survive any content, any split of the stream, and a sender that was cut off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab import frames

KINDS = st.sampled_from([frames.HELLO, frames.OUTPUT, frames.END, frames.ESC])
PAYLOADS = st.lists(
    st.sampled_from([b"", b"a", frames.END, frames.ESC, frames.ESC_END, frames.ESC_ESC]), max_size=8
).map(b"".join)


@given(st.lists(st.tuples(KINDS, PAYLOADS), max_size=5), st.integers(1, 7))
def test_what_is_sent_is_received(messages: list[tuple[bytes, bytes]], size: int) -> None:
    """Any frames, cut into pieces of any size, come out as they went in."""
    stream = b"".join(frames.encode(kind, payload) for kind, payload in messages)
    decoder = frames.Decoder()
    found = []
    for start in range(0, len(stream), size):
        found += decoder.feed(stream[start : start + size])
    assert found == messages


@given(PAYLOADS, st.integers(0, 40))
def test_a_cut_frame_costs_only_itself(payload: bytes, cut: int) -> None:
    """After the beginning of a frame the next whole frame is received."""
    whole = frames.encode(frames.OUTPUT, payload)
    decoder = frames.Decoder()
    decoder.feed(whole[: min(cut, len(whole) - 1)])
    assert decoder.feed(frames.encode(frames.HELLO, b"x"))[-1] == (frames.HELLO, b"x")


def test_a_damaged_frame_is_dropped() -> None:
    """One changed byte fails the checksum."""
    whole = frames.encode(frames.OUTPUT, b"payload")
    assert frames.Decoder().feed(whole.replace(b"pay", b"bay")) == []


def test_noise_without_an_end_is_not_kept() -> None:
    """A stream that never ends a frame takes no memory beyond the longest frame."""
    decoder = frames.Decoder()
    for _ in range(5):
        decoder.feed(b"x" * frames.MAX_ENCODED)
    assert decoder.feed(frames.encode(frames.HELLO)) == [(frames.HELLO, b"")]


def test_a_payload_is_bounded() -> None:
    """What the other side would refuse is not sent."""
    with pytest.raises(ValueError, match="bounded"):
        frames.encode(frames.OUTPUT, b"x" * (frames.MAX_PAYLOAD + 1))
