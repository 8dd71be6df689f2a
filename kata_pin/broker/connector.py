"""A socket of the kernel's process connector (drivers/connector/cn_proc.c)."""

from __future__ import annotations

import socket
from typing import Final

RECEIVE_BYTES: Final = 4 * 1024 * 1024
"""Room for about 10,000 events in the kernel (it accounts some 800 bytes for each)."""

_NETLINK_CONNECTOR: Final = 11
_CN_IDX_PROC: Final = 1
_SO_RCVBUFFORCE: Final = 33  # asm-generic/socket.h; not in Python's socket module


def process_events(first: bytes) -> socket.socket:
    """Return a socket of the process connector on which `first` was sent; raises OSError.

    Connected so that only the kernel can send to it. Linux before 6.6 takes it from CAP_NET_ADMIN.
    """
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    sock = socket.socket(socket.AF_NETLINK, kind, _NETLINK_CONNECTOR)
    try:
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BYTES)
        except PermissionError:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        sock.bind((0, _CN_IDX_PROC))
        sock.connect((0, 0))
        sock.send(first)
    except BaseException:
        sock.close()
        raise
    return sock
