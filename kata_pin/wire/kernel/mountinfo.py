"""Which mount a path is on, and whether that lets anything be written. proc_pid_mountinfo(5)."""

from __future__ import annotations

import re
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.wire.kernel.numbers import check_size

MAX_TEXT: Final = 16 * 1024 * 1024
"""Most bytes that are read: a node with 250 pods has a few thousand mounts."""

_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


def is_read_only(data: bytes, path: str) -> bool:
    """Return whether the mount that a path is on is read-only; raises ParseError.

    The deepest mount point counts, and of several on the same folder the last one.
    """
    check_size(data, MAX_TEXT, "mountinfo")
    best, read_only = b"", None
    wanted = path.encode() + b"/"
    for line in data.split(b"\n"):
        words = line.split(b" ")
        if len(words) < 6:
            continue
        place = _OCTAL.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), words[4])
        point = place.rstrip(b"/") + b"/"
        if wanted.startswith(point) and len(point) >= len(best):
            best = point
            read_only = b"ro" in words[5].split(b",") or b"ro" in words[-1].split(b",")
    if read_only is None:
        raise ParseError("no mount for a path", source="mountinfo", text=path)
    return read_only
