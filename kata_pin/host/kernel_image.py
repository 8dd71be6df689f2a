"""Which Linux a guest was started with: the release that its kernel's image names.

The image is a file of the host, named by the VMM's command line (QEMU's -kernel). A VMM that lies
about it misleads nobody but its own guest; so that it can not have us read what it likes, only
regular files are opened, and at most LIMIT bytes read. An image, or a link to it, that was changed
after the VMM's start says nothing: it may have been another one then.

Blocking; nothing is kept.
"""

from __future__ import annotations

import os
import stat
import time
from typing import Final

from kata_pin.errors import HostError, ParseError
from kata_pin.host.root import HostRoot
from kata_pin.model.thread import ProcessKey
from kata_pin.wire.guest.kernel_image import BANNER, HEAD, find_banner, is_vmlinux, parse_release

LIMIT: Final = 128 * 1024 * 1024
"""Most that is read of a vmlinux in search of its banner: Kata's have about 50 MiB."""

PIECE: Final = 1024 * 1024

_TICKS: Final = os.sysconf("SC_CLK_TCK")
# O_NONBLOCK: opening a FIFO must not hang.
_OPEN: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read_release(root: HostRoot, path: str, vmm: ProcessKey) -> str:
    """Return the release of the kernel that a VMM was started with.

    Raises HostError when there is no such file, ParseError when it does not say, or not any more.
    """
    if not path.startswith("/"):
        raise ParseError("not an absolute path", source="-kernel", text=path)
    # when the VMM started, on the clock of file times
    started_s = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - vmm.starttime / _TICKS)
    try:
        return _read(root.path(path), started_s)
    except OSError as error:
        raise HostError("read", f"kernel image {path}", error.errno or 0) from error


def _read(path: str, started_s: float) -> str:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ParseError("not a regular file", source="-kernel", text=path)
    descriptor = os.open(path, _OPEN)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ParseError("not a regular file", source="-kernel", text=path)
        if max(status.st_ctime, os.lstat(path).st_ctime) > started_s:
            raise ParseError("changed since the VMM's start", source="-kernel", text=path)
        head = os.read(descriptor, HEAD)
        return _banner(descriptor, head) if is_vmlinux(head) else parse_release(head)
    finally:
        os.close(descriptor)


def _banner(descriptor: int, head: bytes) -> str:
    piece, total = head, len(head)
    while True:
        release = find_banner(piece)
        more = b"" if release or total > LIMIT else os.read(descriptor, PIECE)
        if not more:
            break
        piece, total = piece[-BANNER:] + more, total + len(more)
    if not release:
        raise ParseError("a vmlinux that does not say its release", source="kernel image")
    return release
