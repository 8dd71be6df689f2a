"""NRI's multiplexer: byte vectors and the size of what is sent."""

from __future__ import annotations

import pytest

from kata_pin.base.errors import RemoteProtocolError
from kata_pin.peers import ttrpc
from kata_pin.peers.ttrpc import MuxDecoder


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
    data = ttrpc.encode(ttrpc.RUNTIME, b"m" * size)
    sizes = []
    while data:
        connection, length = ttrpc.MUX_HEADER.unpack_from(data)
        assert connection == ttrpc.RUNTIME
        sizes.append(length)
        data = data[ttrpc.MUX_HEADER.size + length :]
    assert sizes == pieces


def test_connections_are_told_apart() -> None:
    """Bytes come out in order, each with its connection; empty frames are nothing."""
    data = ttrpc.encode(1, b"ab") + ttrpc.MUX_HEADER.pack(2, 0) + ttrpc.encode(7, b"c")
    assert list(MuxDecoder().feed(data)) == [(1, b"ab"), (7, b"c")]


def test_the_longest_frame_is_the_runtimes() -> None:
    """A frame as long as Go's side may send passes; one byte more ends the connection."""
    longest = ttrpc.MUX_HEADER.pack(1, ttrpc.MAX_TAKEN)
    assert list(MuxDecoder().feed(longest + b"x")) == [(1, b"x")]
    with pytest.raises(RemoteProtocolError, match="frame of 4194315 bytes"):
        list(MuxDecoder().feed(ttrpc.MUX_HEADER.pack(1, ttrpc.MAX_TAKEN + 1)))
