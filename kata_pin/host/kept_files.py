"""Files of /proc and /sys that are read again and again: their descriptors stay open.

A read then costs a sixth. The kernel makes the content at each read from the beginning. A file of
something that is gone gives EIO or ENODEV, or nothing. It is opened again then: there may be
another one under its name.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final

from kata_pin.host.files import STAT_BYTES, read_once

MOST: Final = 4096
"""Most descriptors that are kept; further files are opened for each read."""


class KeptFiles:
    """See the module. Whoever has one closes it."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self.opened = 0
        """How often a file was opened: a file that is kept is opened again if it is another one."""

    def read(self, path: str, size: int = STAT_BYTES) -> bytes:
        """Return what one read of a file gives; raises OSError."""
        fd = self._open.get(path)
        if fd is not None:
            try:
                data = os.pread(fd, size, 0)
            except OSError:
                data = b""
            if data:
                return data
            os.close(self._open.pop(path))
        self.opened += 1
        if len(self._open) >= MOST:
            return read_once(path, size)
        fd = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(fd, size, 0)

    def keep_only(self, paths: Collection[str]) -> None:
        """Close all others."""
        for path in self._open.keys() - paths:
            os.close(self._open.pop(path))

    def close(self) -> None:
        """Close all."""
        self.keep_only(())
