"""The kernel's process connector as far as a listener can tell: old, new, mute or refusing.

Built from drivers/connector/cn_proc.c and checked against the running kernel by
tests/contract/test_procevents.py. Like the kernel it acknowledges a plain subscription (4 bytes)
with the request's `ack` plus one, never a filtered one (8 bytes), and an old one ignores those.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from typing import Any, Final

from kata_pin.rights.broker.libc import subscription

FORK: Final = 0x1
EXEC: Final = 0x2
COMM: Final = 0x200
EXIT: Final = 0x8000_0000
EVERYTHING: Final = 0xFFFF_FFFF


class _Listener(socket.socket):
    """A listener's socket, which says ENOBUFS once after `lost`."""

    lost = False

    def recv_into(self, *arguments: Any, **named: Any) -> int:
        if self.lost:
            self.lost = False
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return super().recv_into(*arguments, **named)


class FakeConnector:
    """One listener's kernel: `connect` gives it its socket."""

    def __init__(self, *, filters: bool = True, mute: bool = False, error: int = 0) -> None:
        self.filters = filters
        self.mute = mute
        self.error = error
        self.mask = 0
        self.requests: list[bytes] = []
        self._sock: socket.socket | None = None

    def connect(self, token: int, *, execs: bool) -> socket.socket:
        """Return the listener's end, which has subscribed; must run in an event loop."""
        ours, listener = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs = self._listener = _Listener(fileno=listener.detach())
        ours.setblocking(False)
        theirs.setblocking(False)
        self._sock = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._answer)
        for message in subscription(token, execs=execs):
            theirs.send(message)
        return theirs

    def close(self) -> None:
        """Close our end."""
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def born(self, tid: int, tgid: int, parent: int = 1) -> None:
        """Tell of a thread, or of a process when both numbers are equal."""
        self._tell(FORK, parent, parent, tid, tgid)

    def exited(self, tid: int, tgid: int) -> None:
        """Tell of an exit."""
        self._tell(EXIT, tid, tgid, 0, 17)

    def executed(self, pid: int) -> None:
        """Tell of a process that runs another program."""
        self._tell(EXEC, pid, pid, 0, 0)

    def named(self, tid: int, tgid: int) -> None:
        """Tell of a name, which no listener of ours asked for."""
        self._tell(COMM, tid, tgid, 0, 0)

    def lose(self) -> None:
        """Have events been lost: the listener's buffer was full."""
        self._listener.lost = True
        self.born(1, 1)

    def send(self, message: bytes) -> None:
        """Send any bytes."""
        assert self._sock is not None
        self._sock.send(message)

    def _answer(self) -> None:
        assert self._sock is not None
        request = self._sock.recv(4096)
        if not request:
            self.close()
            return
        payload = request[36:]
        self.requests.append(payload)
        (token,) = struct.unpack_from("=I", request, 28)
        if self.mute or (len(payload) == 8 and not self.filters):
            return
        operation, mask = struct.unpack("=II", payload.ljust(8, b"\xff"))
        self.mask = mask if operation == 1 and not self.error else 0
        if len(payload) == 4 and operation == 1:
            self.send(acknowledgement(token + 1, self.error))

    def _tell(self, what: int, *words: int) -> None:
        if what & self.mask:
            self.send(_message(what, words))


def acknowledgement(ack: int, error: int = 0) -> bytes:
    """Return what the kernel answers to all listeners."""
    return _message(0, (error, 0, 0, 0), ack)


def _message(what: int, words: tuple[int, ...], ack: int = 0) -> bytes:
    event = struct.pack("=IIQ4I8x", what, 0, 12345, *words)
    connector = struct.pack("=IIIIHH", 1, 1, 7, ack, len(event), 0)
    return struct.pack("=IHHII", 36 + len(event), 3, 0, 0, 0) + connector + event
