"""Unix sockets: listening on a path without a gap, and who is on the other end (unix(7))."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Final, NamedTuple

from kata_pin.owned_file import OUR_UID

_UCRED: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Peer(NamedTuple):
    """The process on the other end, as it was when it connected."""

    pid: int
    uid: int

    @property
    def trusted(self) -> bool:
        """Whether it runs as root or as the person that started this program (broker/trust.py)."""
        return self.uid in {0, OUR_UID}


def listen(path: str, *, backlog: int, mode: int = 0o600, gid: int | None = None) -> socket.socket:
    """Return a socket that listens on the path, replacing what a dead process left there.

    It appears under its path only once it has its mode and listens, so no client is turned away.
    The caller makes sure that no living process serves the path. Raises OSError.
    """
    fresh = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.settimeout(0)
        listener.bind(fresh)
        os.chmod(fresh, mode)
        if gid is not None and os.stat(fresh).st_gid != gid:  # the unit's group is ours already
            os.chown(fresh, -1, gid)
        listener.listen(backlog)
        os.rename(fresh, path)
    except OSError:
        listener.close()
        raise
    return listener


def peer(connected: socket.socket) -> Peer:
    """Return the process on the other end (SO_PEERCRED)."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return Peer(pid, uid)


def require_trusted(connected: socket.socket) -> None:
    """Raise PermissionError unless the other end runs as root or as our own user."""
    who = peer(connected)
    if not who.trusted:
        raise PermissionError(f"peer (pid {who.pid}) runs as uid {who.uid}, not as root")
