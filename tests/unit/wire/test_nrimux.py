"""NRI's multiplexer: byte vectors and the size of what is sent."""

from __future__ import annotations

import pytest

from kata_pin.errors import RemoteProtocolError
from kata_pin.wire import nrimux
from kata_pin.wire.nrimux import MuxDecoder


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
    data = nrimux.encode(nrimux.RUNTIME, b"m" * size)
    sizes = []
    while data:
        connection, length = nrimux.HEADER.unpack_from(data)
        assert connection == nrimux.RUNTIME
        sizes.append(length)
        data = data[nrimux.HEADER.size + length :]
    assert sizes == pieces


def test_connections_are_told_apart() -> None:
    """Bytes come out in order, each with its connection; empty frames are nothing."""
    data = nrimux.encode(1, b"ab") + nrimux.HEADER.pack(2, 0) + nrimux.encode(7, b"c")
    assert list(MuxDecoder().feed(data)) == [(1, b"ab"), (7, b"c")]


def test_the_longest_frame_is_the_runtimes() -> None:
    """A frame as long as Go's side may send passes; one byte more ends the connection."""
    longest = nrimux.HEADER.pack(1, nrimux.MAX_TAKEN)
    assert list(MuxDecoder().feed(longest + b"x")) == [(1, b"x")]
    with pytest.raises(RemoteProtocolError, match="frame of 4194315 bytes"):
        list(MuxDecoder().feed(nrimux.HEADER.pack(1, nrimux.MAX_TAKEN + 1)))
