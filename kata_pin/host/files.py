"""Small bounded reads of /proc and /sys, the only way host/ opens a file.

Nothing is kept open. Errors are bare OSError: each caller knows what a missing file means there.
"""

from __future__ import annotations

import os
from typing import Final

STAT_BYTES: Final = 4096
"""Room for a stat file or one of sysfs: one record of a page at most, so one read returns it."""

TEXT_BYTES: Final = 64 * 1024
"""Most that is read of a sysfs or cgroup file; CpuSet.MAX_TEXT is half of it."""


def read_once(path: str, size: int = STAT_BYTES) -> bytes:
    """Return what one read of the file gives: for single-record files such as stat."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)


def read_bytes(path: str, limit: int = TEXT_BYTES) -> bytes:
    """Return the file's bytes, at most `limit`; a longer file is cut there.

    A seq_file may return less than asked for before its end, so reads go on until nothing comes.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, limit)
        while len(data) < limit:
            more = os.read(fd, limit - len(data))
            if not more:
                break
            data += more
        return data
    finally:
        os.close(fd)


def read_text(path: str, limit: int = TEXT_BYTES) -> str:
    """Return the file as text without white space around it; odd bytes become U+FFFD."""
    return read_bytes(path, limit).decode("utf-8", "replace").strip()
