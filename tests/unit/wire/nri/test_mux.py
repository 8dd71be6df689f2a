"""NRI's multiplexer: byte vectors and the size of what is sent."""

from __future__ import annotations

import pytest

from kata_pin.errors import RemoteProtocolError
from kata_pin.wire.nri import mux
from kata_pin.wire.nri.mux import MuxDecoder


@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        (0, []),
        (1, [1]),
        (4095, [4095]),
        (4096, [4096]),
        (4097, [4096, 1]),
        (9000, [4096, 4096, 808]),
    ],
)
def test_messages_are_cut(size: int, pieces: list[int]) -> None:
    """No frame is longer than 4096 bytes: Go's side gives the connection up otherwise."""
    data = mux.encode(mux.RUNTIME, b"m" * size)
    sizes = []
    while data:
        connection, length = mux.HEADER.unpack_from(data)
        assert connection == mux.RUNTIME
        sizes.append(length)
        data = data[mux.HEADER.size + length :]
    assert sizes == pieces


def test_connections_are_told_apart() -> None:
    """Bytes come out in order, each with its connection; empty frames are nothing."""
    data = mux.encode(1, b"ab") + mux.HEADER.pack(2, 0) + mux.encode(7, b"c")
    assert list(MuxDecoder().feed(data)) == [(1, b"ab"), (7, b"c")]


def test_the_longest_frame_is_the_runtimes() -> None:
    """A frame as long as Go's side may send passes; one byte more ends the connection."""
    longest = mux.HEADER.pack(1, mux.MAX_TAKEN)
    assert list(MuxDecoder().feed(longest + b"x")) == [(1, b"x")]
    with pytest.raises(RemoteProtocolError, match="frame of 4194315 bytes"):
        list(MuxDecoder().feed(mux.HEADER.pack(1, mux.MAX_TAKEN + 1)))
