"""Files of /proc and /sys that are read again and again: their descriptors stay open.

A read then costs a sixth. The kernel makes the content at each read from the beginning. A file of
something that is gone gives EIO or ENODEV, or nothing. It is opened again then: there may be
another one under its name.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection
from errno import EMFILE, ENFILE
from typing import Final

from kata_pin.host.files import STAT_BYTES, read_once

MOST: Final = 4096
"""Most descriptors that are kept; further files are opened for each read."""

SHARE: Final = 4
"""The part of the process's descriptors that is kept at most: one in so many."""

NO_ROOM: Final = frozenset({EMFILE, ENFILE})
"""Errors that say nothing of a file: there is no descriptor left to open it with."""


class KeptFiles:
    """See the module. Whoever has one closes it."""

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MOST if soft == resource.RLIM_INFINITY else min(MOST, soft // SHARE)
        self._open: dict[str, int] = {}
        self._passing: set[str] = set()
        """What is opened for each read."""
        self.opened: set[str] = set()
        """Files that are new, or other ones under a name, until the reader clears this.

        One that is opened for each read is new the first time alone.
        """

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
        if len(self._open) >= self._most:
            return self._pass(path, size)
        fd = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if path in self._passing:
            self._passing.remove(path)
        else:
            self.opened.add(path)
        return os.pread(fd, size, 0)

    def _pass(self, path: str, size: int) -> bytes:
        """Read a file that is not kept."""
        try:
            data = read_once(path, size)
        except OSError as error:
            if error.errno not in NO_ROOM:
                self._passing.discard(path)
            raise
        if path not in self._passing:
            self._passing.add(path)
            self.opened.add(path)
        return data

    def keep_only(self, paths: Collection[str]) -> None:
        """Close all others, and forget them."""
        self._passing.intersection_update(paths)
        self.opened.intersection_update(paths)
        for path in self._open.keys() - paths:
            os.close(self._open.pop(path))

    def close(self) -> None:
        """Close all."""
        self.keep_only(())
