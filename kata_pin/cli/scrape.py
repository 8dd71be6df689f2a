"""Reads the daemon's metrics over HTTP, from its unix socket or its loopback port."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Final

from kata_pin.errors import DaemonError, RemoteProtocolError, reason_of
from kata_pin.model.reports.metrics import MetricsDocument

if TYPE_CHECKING:
    from kata_pin.config.metrics import Endpoint

ANSWER_S: Final = 10.0
MAX_ANSWER: Final = 64 * 1024 * 1024
CHUNK: Final = 256 * 1024

_REQUEST: Final = b"GET /metrics HTTP/1.0\r\n\r\n"


def scrape(endpoint: Endpoint, runtime_dir: str) -> MetricsDocument:
    """Return the metrics; raises DaemonError, RemoteProtocolError for another answer."""
    from kata_pin.config.metrics import EndpointKind

    if endpoint.kind is EndpointKind.NONE:
        hint = "set metrics.listen to unix or to a loopback port, and restart the daemon"
        raise DaemonError("metrics are not served (metrics.listen: none)", hint=hint)
    unix = endpoint.kind is EndpointKind.UNIX
    path = os.path.join(runtime_dir, "metrics.sock")
    address = f"unix:{path}" if unix else f"http://{endpoint}/metrics"
    family = socket.AF_UNIX if unix else socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as peer:
            peer.settimeout(ANSWER_S)
            peer.connect(path if unix else (endpoint.host, endpoint.port))
            peer.sendall(_REQUEST)
            answer = _everything(peer)
    except PermissionError as error:
        hint = "run as root, or join group kata-pin for read-only access"
        raise DaemonError(f"no permission to connect to {address}", hint=hint) from error
    except OSError as error:
        hint = "systemctl status kata-pin; kata-pin doctor says where metrics are served"
        raise DaemonError(
            f"no metrics from {address}: {error.strerror or reason_of(error)}", hint=hint
        ) from error
    return MetricsDocument(address=address, text=_body(answer, address))


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


def _body(answer: bytes, address: str) -> str:
    head, end, body = answer.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if not end or len(words) < 2 or not words[0].startswith(b"HTTP/1.") or words[1] != b"200":
        first = " ".join(word.decode("ascii", "replace") for word in words)[:80]
        raise RemoteProtocolError(f"{address} is no metrics endpoint of kata-pin: {first!r}")
    return body.decode("utf-8", "replace")
