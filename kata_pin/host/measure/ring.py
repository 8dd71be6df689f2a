"""One of perf's ring buffers: mapped, enabled, read piece by piece."""

from __future__ import annotations

import mmap
import os
import struct
from fcntl import ioctl
from typing import Final

from kata_pin.wire.kernel.perf import HEAD_AT, TAIL_AT, between

ENABLE: Final = 0x2400
_DISABLE: Final = 0x2401
_LONGEST: Final = 256  # bytes of any record
_POSITION: Final = struct.Struct("@Q")  # native: one load or store of 8 bytes


class Ring:
    """The ring of an event, whose descriptor it owns; raises OSError where it cannot be mapped."""

    def __init__(self, fd: int, size: int) -> None:
        """`size` in bytes of data: a power of two of pages."""
        self.fd = fd
        try:
            self._map = mmap.mmap(fd, (1 + max(1, size // mmap.PAGESIZE)) * mmap.PAGESIZE)
        except BaseException:
            os.close(fd)
            raise
        self._area = memoryview(self._map)[mmap.PAGESIZE :]
        self.full = False
        """Whether it was full when it was last read: a loss is only recorded after that."""

    def enable(self) -> None:
        """Begin to record."""
        ioctl(self.fd, ENABLE, 0)

    def disable(self) -> None:
        """Record nothing more."""
        ioctl(self.fd, _DISABLE, 0)

    def read(self) -> bytes:
        """Return what was written since the last call, and make room for more.

        Raises ParseError where the positions make no sense; then what was written is left out.
        """
        (head,) = _POSITION.unpack_from(self._map, HEAD_AT)
        (tail,) = _POSITION.unpack_from(self._map, TAIL_AT)
        self.full = head - tail > len(self._area) - _LONGEST
        try:
            return between(self._area, tail, head)
        finally:
            _POSITION.pack_into(self._map, TAIL_AT, head)

    def close(self) -> None:
        """Unmap it and close the event."""
        self._area.release()
        self._map.close()
        os.close(self.fd)
