"""Asks the daemon over its control or status socket: one request per connection, in time."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

from kata_pin.errors import DaemonError, RemoteProtocolError, reason_of
from kata_pin.remedy import Remedy, here
from kata_pin.wire.control import MAX_REPLY, LineDecoder, encode_request, parse_reply

PATIENCE_S: Final = 0.5
"""Wait after which the user is told what the command waits for."""

CHUNK: Final = 256 * 1024

SILENT: Final = Remedy(
    "systemctl restart kata-pin; its log: journalctl -u kata-pin",
    "its log: kubectl logs -c daemon of this pod; if the pod is deleted, its DaemonSet starts "
    "another",
)
NO_PERMISSION: Final = Remedy(
    "run as root, or join group kata-pin for read-only access",
    "kubectl exec into the container daemon, whose user may",
)


class DaemonAway(DaemonError):  # noqa: N818 - a state of the world
    """No daemon is listening."""


class DaemonSilent(DaemonError):  # noqa: N818 - as above
    """A daemon is listening but does not answer in time."""


def ask(
    path: str,
    verb: str,
    arguments: Mapping[str, object],
    deadline_s: float,
    *,
    waiting: Callable[[float], None] | None = None,
) -> bytes:
    """Send one request to a socket and return the reply's encoded document.

    `waiting` is called with the deadline in seconds once PATIENCE_S passed without a reply. Raises
    DaemonAway, DaemonSilent, DaemonError (refused, or no right to connect) and RemoteProtocolError.
    """
    deadline = time.monotonic() + deadline_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as peer:
            peer.settimeout(deadline_s)
            peer.connect(path)
            peer.sendall(encode_request(verb, arguments))
            if waiting is not None and not _readable(peer, PATIENCE_S):
                waiting(deadline_s)
            line = _line(peer, deadline)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise DaemonAway(f"no daemon is listening on {path}") from error
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
    return parse_reply(line)


def _readable(peer: socket.socket, seconds: float) -> bool:
    """Return whether there is something to read, or the other side ended, within the time."""
    waiting = select.poll()
    waiting.register(peer, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


def _line(peer: socket.socket, deadline: float) -> bytes:
    decoder = LineDecoder(MAX_REPLY)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        peer.settimeout(left)
        data = peer.recv(CHUNK)
        if not data:
            raise RemoteProtocolError("the daemon closed the connection before it answered")
        lines = decoder.feed(data)
        if lines:
            return lines[0]
