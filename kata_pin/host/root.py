"""Where the host's files hang, and how calls that need rights are made: what tests replace.

A HostRoot lives as long as the program. A captured tree is an ordinary root; a test that wants
affinities there brings its own Calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kata_pin.calls import DIRECT, Calls


@dataclass(frozen=True)
class HostRoot:
    """The root that every host path hangs off.

    `debugfs` is where debugfs is mounted, a path as seen from `root` (D6: it may be a
    private mount). `calls` makes the system calls that may need rights.
    """

    root: str = "/"
    debugfs: str = "/sys/kernel/debug"
    calls: Calls = DIRECT
    _prefix: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "_prefix", self.root.rstrip("/"))

    @property
    def live(self) -> bool:
        """Whether this is the running system and not a captured tree."""
        return not self._prefix

    def path(self, absolute: str) -> str:
        """Return where an absolute path of the host is found."""
        return f"{self._prefix}/{absolute.lstrip('/')}"

    def proc(self, *parts: str | int) -> str:
        """Return a path below /proc."""
        return "/".join((f"{self._prefix}/proc", *map(str, parts)))

    def sys(self, *parts: str | int) -> str:
        """Return a path below /sys."""
        return "/".join((f"{self._prefix}/sys", *map(str, parts)))

    def debug(self, *parts: str | int) -> str:
        """Return a path below debugfs."""
        return "/".join((self.path(self.debugfs), *map(str, parts)))


HOST: Final = HostRoot()
"""The running system."""
