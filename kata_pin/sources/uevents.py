"""CPUs that go on- or offline, from the kernel's uevents over netlink.

An event only says when to look (D1). Taking a CPU offline through sysfs sends one after it is done
(drivers/base/core.c, device_offline); the cpusets change a moment later, without an event. Needs no
capability, but the network namespace of the first user namespace.

The socket lives as long as the iteration. Which CPUs are online: host/topology.py.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Final

from kata_pin.errors import HostError

NETLINK_KOBJECT_UEVENT: Final = 15  # linux/netlink.h
KERNEL_GROUP: Final = 1
"""The kernel's own messages; group 2 has udev's, which other privileged processes can send."""

RECEIVE_BYTES: Final = 1024 * 1024
MESSAGE_BYTES: Final = 8192  # UEVENT_BUFFER_SIZE is 2048 bytes of variables, the path before them

_ACTIONS: Final = frozenset({b"online", b"offline", b"add", b"remove"})
_CPUS: Final = b"/devices/system/cpu/cpu"


def kernel_events() -> socket.socket:
    """Return a socket that receives the kernel's uevents; raises OSError."""
    sock = socket.socket(
        socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, NETLINK_KOBJECT_UEVENT
    )
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        sock.bind((0, KERNEL_GROUP))
    except OSError:
        sock.close()
        raise
    return sock


async def cpu_changes(
    connect: Callable[[], socket.socket] = kernel_events,
) -> AsyncGenerator[None, None]:
    """Yield once listening, then whenever a CPU went on- or offline, or events were lost.

    Raises HostError where the kernel sends no uevents.
    """
    loop = asyncio.get_running_loop()
    try:
        with connect() as sock:
            yield None
            while True:
                if await _next_is_about_cpu(loop, sock):
                    yield None
                await asyncio.sleep(0)  # a node that starts pods has thousands of other uevents
    except OSError as error:
        raise HostError("receive", "the kernel's uevents", error.errno or errno.EIO) from error


async def _next_is_about_cpu(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bool:
    """Wait for a message; return whether it is about a CPU, or messages were lost."""
    try:
        message, sender = await loop.sock_recvfrom(sock, MESSAGE_BYTES)
    except OSError as error:
        if error.errno != errno.ENOBUFS:
            raise
        return True
    return sender[0] == 0 and is_about_cpu(message)


def is_about_cpu(message: bytes) -> bool:
    """Return whether a uevent is about a CPU, such as `online@/devices/system/cpu/cpu3`."""
    action, _, path = message.partition(b"\0")[0].partition(b"@")
    return action in _ACTIONS and path.startswith(_CPUS) and path[len(_CPUS) :].isdigit()
