"""What a process may write, from the outside: its mounts and its capabilities. Nothing is written.

A write to a tree that systemd or a container runtime made read-only fails with EROFS, and nothing
else shows that beforehand.
"""

from __future__ import annotations

from typing import Final

from kata_pin.host.quiet.reading import known
from kata_pin.host.root import HostRoot
from kata_pin.model.quiet.node import Unknown
from kata_pin.wire.kernel.mountinfo import MAX_TEXT, is_read_only
from kata_pin.wire.proc import status_field

SETUID: Final = 7
NET_ADMIN: Final = 12
"""Numbers of capabilities (linux/capability.h)."""


def is_read_only_for(root: HostRoot, pid: int, path: str) -> bool | Unknown:
    """Return whether a process sees a path on a read-only mount; never raises."""
    return known(root.proc(pid, "mountinfo"), lambda data: is_read_only(data, path), MAX_TEXT + 1)


def may_have(root: HostRoot, pid: int, capability: int) -> bool | Unknown:
    """Return whether a capability is in a process's bounding set; never raises."""

    def parse(data: bytes) -> bool:
        return bool(int(status_field(data, "CapBnd") or "", 16) >> capability & 1)

    return known(root.proc(pid, "status"), parse)
