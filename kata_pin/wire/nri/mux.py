"""NRI's multiplexer: several ttrpc connections over one stream.

    frame    connection u32 | payload length u32 | payload      (big-endian)

There are two fixed connections, 1 for the plugin's service (the runtime calls), 2 for the runtime's
(the plugin calls). Source: github.com/containerd/nri, pkg/net/multiplex/mux.go and ttrpc.go.

Received frames may cut a connection's byte stream anywhere. Sent frames are cut at `MAX_SENT`: Go's
side reads a connection through a buffer of 4096 bytes and fails with ENOMEM on a frame that does
not fit (containerd/nri, conn.Read).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from kata_pin.errors import RemoteProtocolError
from kata_pin.wire import ttrpc

PLUGIN: Final = 1  # the connection on which the runtime calls the plugin
RUNTIME: Final = 2  # the connection on which the plugin calls the runtime
MAX_SENT: Final = 4096  # longest payload of a frame that is sent

MAX_TAKEN: Final = ttrpc.MAX_DATA + ttrpc.HEADER.size
"""Longest payload of a frame that is accepted: the most that Go's side sends."""

HEADER: Final = struct.Struct(">II")


class MuxDecoder:
    """Takes the trunk's bytes in any pieces; holds less than one header."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._connection = 0
        self._left = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Take more bytes; yield (connection, its bytes). Must be run to its end.

        RemoteProtocolError for a frame longer than MAX_TAKEN; the trunk is unusable after it.
        """
        view = memoryview(data)
        while view:
            if not self._left:
                view = self._take_header(view)
                continue
            piece = view[: self._left]
            self._left -= len(piece)
            view = view[len(piece) :]
            yield self._connection, bytes(piece)

    def _take_header(self, view: memoryview) -> memoryview:
        missing = HEADER.size - len(self._header)
        self._header += view[:missing]
        if len(self._header) == HEADER.size:
            self._connection, self._left = HEADER.unpack(self._header)
            self._header.clear()
            if self._left > MAX_TAKEN:
                raise RemoteProtocolError(f"NRI frame of {self._left} bytes")
        return view[missing:]


def encode(connection: int, message: bytes) -> bytes:
    """Return the trunk's bytes of one ttrpc message."""
    parts: list[bytes] = []
    for start in range(0, len(message), MAX_SENT):
        piece = message[start : start + MAX_SENT]
        parts += (HEADER.pack(connection, len(piece)), piece)
    return b"".join(parts)
