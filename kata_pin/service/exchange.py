"""Asks the daemon's sockets: one request per connection, in time."""

from __future__ import annotations

import select
import time
from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_STREAM, socket
from collections.abc import Callable, Iterator
from typing import Final

from kata_pin.base.errors import DaemonError, RemoteProtocolError, reason_of
from kata_pin.base.values import Remedy, here

# The control protocol has lines of bounded length; violations are RemoteProtocolError.

MAX_REQUEST: Final = 64 * 1024  # longest request line, newline included

MAX_REPLY: Final = 64 * 1024 * 1024
"""Longest reply line a client takes: a node with 250 sandboxes fills about 3 MiB."""


# Built on `_socket`: `socket` makes enums, and that takes longer than the daemon's answer.

PATIENCE_S: Final = 0.5
"""Wait after which the user is told what the command waits for."""

CHUNK: Final = 64 * 1024

SILENT: Final = Remedy(
    "systemctl restart kata-pin; its log: journalctl -u kata-pin",
    "its log: kubectl logs -c daemon of this pod; if the pod is deleted, its DaemonSet starts "
    "another",
)
AWAY: Final = Remedy("systemctl status kata-pin", "kubectl logs -c daemon of this pod")
NO_PERMISSION: Final = Remedy(
    "run as root, or join group kata-pin for read-only access",
    "kubectl exec into the container daemon, whose user may",
)


class DaemonAway(DaemonError):  # noqa: N818 - a state of the world
    """No daemon is listening."""


class DaemonSilent(DaemonError):  # noqa: N818 - as above
    """A daemon is listening but does not answer in time."""


def exchange(
    path: str, request: bytes, deadline_s: float, *, waiting: Callable[[float], None] | None = None
) -> bytearray:
    """Send the line of a request; return the line of the reply.

    `waiting` is called with the deadline in seconds once PATIENCE_S passed without a reply. Raises
    DaemonAway, DaemonSilent, DaemonError (no right to connect) and RemoteProtocolError.
    """
    deadline = time.monotonic() + deadline_s
    try:
        peer = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
        try:
            peer.settimeout(deadline_s)
            peer.connect(path)
            peer.sendall(request)
            if waiting is not None and not _readable(peer, PATIENCE_S):
                waiting(deadline_s)
            return _line(peer, deadline)
        finally:
            peer.close()
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise DaemonAway(f"no daemon is listening on {path}", hint=here(AWAY)) from error
    except PermissionError as error:
        raise DaemonError(
            f"no permission to connect to {path}",
            hint=here(NO_PERMISSION),
        ) from error
    except (BrokenPipeError, ConnectionResetError) as error:  # whom it does not serve
        raise DaemonError(
            f"the daemon closed the connection on {path}", hint=here(NO_PERMISSION)
        ) from error
    except (TimeoutError, BlockingIOError) as error:  # the latter: its queue is full
        raise DaemonSilent(
            f"the daemon did not answer on {path} within {deadline_s:g} s",
            hint=here(SILENT),
        ) from error
    except OSError as error:
        raise DaemonError(f"cannot talk to {path}: {error.strerror or reason_of(error)}") from error


def _readable(peer: socket, seconds: float) -> bool:
    """Return whether there is something to read, or the other side ended, within the time."""
    waiting = select.poll()
    waiting.register(peer, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


def _line(peer: socket, deadline: float) -> bytearray:
    line = bytearray()
    for piece in _pieces(peer, deadline):
        line += piece
        if len(line) > MAX_REPLY:
            raise RemoteProtocolError(f"line longer than {MAX_REPLY} bytes")
        if line.endswith(b"\n"):
            return line
    raise RemoteProtocolError("the daemon closed the connection before it answered")


def _pieces(peer: socket, deadline: float) -> Iterator[bytes]:
    """Yield what the other side sends until it closes; raises OSError, TimeoutError in the end."""
    while (left := deadline - time.monotonic()) > 0:
        peer.settimeout(left)
        piece = peer.recv(CHUNK)
        if not piece:
            return
        yield piece
    raise TimeoutError("timed out")


# The daemon's metrics, read over HTTP from its unix socket or its loopback port.

METRICS_S: Final = 10.0

_GET_METRICS: Final = b"GET /metrics HTTP/1.0\r\n\r\n"


def read_metrics(family: int, target: str | tuple[str, int], address: str) -> bytes:
    """Return the text of the metrics; `address` names the target in errors.

    Raises OSError, RemoteProtocolError for another answer.
    """
    deadline = time.monotonic() + METRICS_S
    peer = socket(family, SOCK_STREAM | SOCK_CLOEXEC)
    try:
        peer.settimeout(METRICS_S)
        peer.connect(target)
        peer.sendall(_GET_METRICS)
        answer = bytearray()
        for piece in _pieces(peer, deadline):
            answer += piece
            if len(answer) > MAX_REPLY:
                raise RemoteProtocolError(f"{address}: metrics longer than {MAX_REPLY} bytes")
    finally:
        peer.close()
    head, end, body = bytes(answer).partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if not end or len(words) < 2 or not words[0].startswith(b"HTTP/1.") or words[1] != b"200":
        first = " ".join(word.decode("ascii", "replace") for word in words)[:80]
        raise RemoteProtocolError(f"{address} is not a metrics endpoint of kata-pin: {first!r}")
    return body
