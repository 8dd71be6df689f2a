"""The host's devices that a sandbox's QEMU gets as open descriptors, where this machine has them.

vhost-vsock with a context id that nobody else has, a tap with two queues, vhost-net for each queue.
A device that is missing is said in the log, and the VM goes without. The caller closes them once
QEMU has them. Out of scope: what QEMU's command line says about them (machine.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable
from typing import Final

QUEUES: Final = 2

# linux/if_tun.h, linux/vhost.h
_TUNSETIFF: Final = 0x400454CA
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_IFF_VNET_HDR: Final = 0x4000
_IFF_MULTI_QUEUE: Final = 0x0100
_VHOST_VSOCK_SET_GUEST_CID: Final = 0x4008AF60

Say = Callable[[str], None]


class Devices:
    """The descriptors of one sandbox."""

    def __init__(self) -> None:
        self.cid = 0
        self.vsock = -1
        self.taps: list[int] = []
        self.vhost: list[int] = []

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All of them, to pass to QEMU."""
        return (*([self.vsock] if self.cid else []), *self.vhost, *self.taps)

    def close(self) -> None:
        """Close our ends."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def open_vsock(self, say: Say) -> None:
        """Open vhost-vsock with a random context id, as Kata's FindContextID does."""
        try:
            self.vsock = os.open("/dev/vhost-vsock", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            say(f"no vhost-vsock: {error}")
            return
        while not self.cid:
            cid = int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF | 0x10
            with contextlib.suppress(OSError):  # taken: try another
                fcntl.ioctl(self.vsock, _VHOST_VSOCK_SET_GUEST_CID, struct.pack("Q", cid))
                self.cid = cid

    def open_network(self, name: str, say: Say) -> None:
        """Open a tap in this thread's network namespace, and vhost-net; a tap alone also works."""
        try:
            for _ in range(QUEUES):
                self.taps.append(_tap(name))
        except OSError as error:
            say(f"no tap: {error}")
            return
        try:
            for _ in range(QUEUES):
                self.vhost.append(os.open("/dev/vhost-net", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            say(f"no vhost-net: {error}")


def _tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR | _IFF_MULTI_QUEUE
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    except OSError:
        os.close(tap)
        raise
    return tap
