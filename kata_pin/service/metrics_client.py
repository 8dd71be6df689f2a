"""Reads the daemon's metrics over HTTP, from its unix socket or its loopback port."""

from __future__ import annotations

import socket
import time
from typing import Final

from kata_pin.base.errors import RemoteProtocolError

ANSWER_S: Final = 10.0
MAX_ANSWER: Final = 64 * 1024 * 1024
CHUNK: Final = 256 * 1024

_REQUEST: Final = b"GET /metrics HTTP/1.0\r\n\r\n"


def read_metrics(
    family: socket.AddressFamily, target: str | tuple[str, int], address: str
) -> bytes:
    """Return the text of the metrics; `address` names the target in errors.

    Raises OSError, RemoteProtocolError for another answer.
    """
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as peer:
        peer.settimeout(ANSWER_S)
        peer.connect(target)
        peer.sendall(_REQUEST)
        return _body(_everything(peer), address)


def _everything(peer: socket.socket) -> bytes:
    """Return what the other side sends until it closes; raises OSError, TimeoutError in the end."""
    deadline, pieces, size = time.monotonic() + ANSWER_S, [], 0
    while size <= MAX_ANSWER:
        peer.settimeout(max(0.001, deadline - time.monotonic()))
        piece = peer.recv(CHUNK)
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def _body(answer: bytes, address: str) -> bytes:
    head, end, body = answer.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if not end or len(words) < 2 or not words[0].startswith(b"HTTP/1.") or words[1] != b"200":
        first = " ".join(word.decode("ascii", "replace") for word in words)[:80]
        raise RemoteProtocolError(f"{address} is not a metrics endpoint of kata-pin: {first!r}")
    return body
