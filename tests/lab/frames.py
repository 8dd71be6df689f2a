"""Frames on a byte pipe that may be cut anywhere (a virtio-serial port).

Both ends use this file, so it needs nothing but the standard library. Framing is that of SLIP
(RFC 1055): a frame stands between END bytes, and an END or ESC inside is escaped. Whoever joins in
the middle of a frame is right again at the next END; a CRC drops the frame that was cut.
"""

from __future__ import annotations

import zlib
from typing import Final

END: Final = b"\xc0"
ESC: Final = b"\xdb"
ESC_END: Final = b"\xdb\xdc"
ESC_ESC: Final = b"\xdb\xdd"

MAX_PAYLOAD: Final = 32 * 1024
MAX_ENCODED: Final = 2 * (MAX_PAYLOAD + 5)
"""Longest frame between its END bytes: every byte escaped."""

# Host to guest: hello, run, input, end of input, window size, kill.
HELLO: Final = b"H"
RUN: Final = b"R"
INPUT: Final = b"I"
INPUT_END: Final = b"Z"
WINDOW: Final = b"W"
KILL: Final = b"K"
# Guest to host: hello, output, error output, exit.
OUTPUT: Final = b"O"
ERRORS: Final = b"E"
EXIT: Final = b"X"


def encode(kind: bytes, payload: bytes = b"") -> bytes:
    """Return one frame; `kind` is one byte, `payload` at most MAX_PAYLOAD bytes."""
    if len(kind) != 1 or len(payload) > MAX_PAYLOAD:
        raise ValueError("a frame has a kind of one byte and a bounded payload")
    body = kind + payload
    body += zlib.crc32(body).to_bytes(4, "big")
    return END + body.replace(ESC, ESC_ESC).replace(END, ESC_END) + END


class Decoder:
    """Bytes in, frames out; what is damaged is dropped."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Take received bytes; return the (kind, payload) of each frame they complete."""
        *whole, self._pending = (self._pending + data).split(END)
        if len(self._pending) > MAX_ENCODED:
            self._pending = b""
        frames = []
        for text in whole:
            body = text.replace(ESC_END, END).replace(ESC_ESC, ESC)
            if len(body) >= 5 and zlib.crc32(body[:-4]) == int.from_bytes(body[-4:], "big"):
                frames.append((body[:1], body[1:-4]))
        return frames
