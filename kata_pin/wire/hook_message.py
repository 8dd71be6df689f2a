r"""The hook's messages: one request with the bytes of stdin, one to two reply lines.

    request   KP1 <phase> <boottime_ns> <pid> <length>\n<length bytes>
    replies   recorded\n  then, for prestart and createRuntime, pinned\n or unpinned <reason>\n
              refused <reason>\n  for an invalid message

A spool file holds exactly the bytes of a request and is named after its stamp and pid, which
identify the message: one that was answered late and also spooled counts once. The hook program
imports nothing of the package and builds the same bytes on its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kata_pin.errors import RemoteProtocolError
from kata_pin.wire.oci import MAX_PID, Phase

MAX_HEADER: Final = 128  # longest header line in bytes, newline included
UNINSTALLED: Final = "uninstalled"
"""A file in the spool that tells hooks which were left behind not to use it (kata_pin/hook.py)."""

MAX_SPOOLED: Final = 10_000
"""Messages in the spool from which on hooks leave no more (kata_pin/hook.py)."""

MAX_BODY: Final = 4 * 1024 * 1024  # longest state accepted from a hook
MAX_STAMP: Final = (1 << 63) - 1
MAX_REASON: Final = 200

RECORDED: Final = b"recorded\n"
PINNED: Final = b"pinned\n"

_HEADER: Final = re.compile(
    rb"KP1 ([A-Za-z]{1,32}) (0|[1-9][0-9]{0,18}) ([1-9][0-9]{0,6}) (0|[1-9][0-9]{0,6})\n\Z"
)
_SPOOL_NAME: Final = re.compile(r"(0|[1-9][0-9]{0,18})-([1-9][0-9]{0,6})\.msg\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class HookMessage:
    """One request. `stamp_ns` is CLOCK_BOOTTIME when the hook started, `pid` the hook's own."""

    phase: Phase
    stamp_ns: int
    pid: int
    body: bytes

    @property
    def key(self) -> tuple[int, int]:
        """What identifies the message."""
        return self.stamp_ns, self.pid

    @property
    def spool_name(self) -> str:
        """The name of its spool file."""
        return f"{self.stamp_ns}-{self.pid}.msg"


class HookDecoder:
    """Takes the bytes of one connection in any pieces; holds at most one message.

    After a RemoteProtocolError the connection must be closed.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: tuple[Phase, int, int, int] | None = None

    def feed(self, data: bytes) -> HookMessage | None:
        """Take more bytes; return the message once it is complete, None until then."""
        self._buffer += data
        if self._header is None:
            end = self._buffer.find(b"\n", 0, MAX_HEADER) + 1
            if not end and len(self._buffer) >= MAX_HEADER:
                raise RemoteProtocolError(f"no hook header in the first {MAX_HEADER} bytes")
            if not end:
                return None
            self._header = _parse_header(bytes(self._buffer[:end]))
            del self._buffer[:end]
        phase, stamp_ns, pid, length = self._header
        surplus = len(self._buffer) - length
        if surplus > 0:
            raise RemoteProtocolError(f"{surplus} bytes after the hook message")
        return None if surplus else HookMessage(phase, stamp_ns, pid, bytes(self._buffer))


def _parse_header(line: bytes) -> tuple[Phase, int, int, int]:
    """Return phase, stamp, pid and the length of the state."""
    match = _HEADER.match(line)
    if match is None:
        raise RemoteProtocolError(f"invalid hook header: {line!r}")
    try:
        phase = Phase(match[1].decode("ascii"))
    except ValueError:
        raise RemoteProtocolError(f"unknown hook phase: {match[1]!r}") from None
    stamp_ns, pid, length = int(match[2]), int(match[3]), int(match[4])
    if stamp_ns > MAX_STAMP or pid > MAX_PID or length > MAX_BODY:
        raise RemoteProtocolError(f"hook header out of bounds: {line!r}")
    return phase, stamp_ns, pid, length


def encode(message: HookMessage) -> bytes:
    """Return the bytes of a request, which are also those of its spool file."""
    head = f"KP1 {message.phase.value} {message.stamp_ns} {message.pid} {len(message.body)}\n"
    return head.encode("ascii") + message.body


def decode(data: bytes) -> HookMessage:
    """Read a complete request (a spool file); RemoteProtocolError if it is cut short or invalid."""
    message = HookDecoder().feed(data)
    if message is None:
        raise RemoteProtocolError(f"hook message cut short after {len(data)} bytes")
    return message


def parse_spool_name(name: str) -> tuple[int, int] | None:
    """Return (stamp_ns, pid) of a spool file's name; None for any other file."""
    match = _SPOOL_NAME.match(name)
    return None if match is None else (int(match[1]), int(match[2]))


def unpinned(reason: str) -> bytes:
    """Return the reply line for pins that are not applied."""
    return b"unpinned " + _one_line(reason)


def refused(reason: str) -> bytes:
    """Return the reply line for an invalid message; nothing follows it."""
    return b"refused " + _one_line(reason)


def _one_line(reason: str) -> bytes:
    """Return `reason` as printable ASCII on one line, never empty."""
    printable = "".join(char if " " <= char <= "~" else "?" for char in reason)
    return (printable.strip()[:MAX_REASON] or "no reason given").encode("ascii") + b"\n"
