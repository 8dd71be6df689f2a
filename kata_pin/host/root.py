"""Where the host's files hang, and how its scheduler is asked: the one thing tests replace.

A HostRoot lives as long as the program. A captured tree is an ordinary root; a test that wants
affinities there brings its own Scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol


class Scheduler(Protocol):
    """The two system calls of sched_setaffinity(2), raising OSError as `os` does."""

    def get_affinity(self, tid: int) -> set[int]:
        """Return the CPUs that the thread may use, offline ones left out by the kernel."""

    def set_affinity(self, tid: int, cpus: Iterable[int]) -> None:
        """Set the thread's affinity."""


class KernelScheduler:
    """The running kernel."""

    get_affinity = staticmethod(os.sched_getaffinity)
    set_affinity = staticmethod(os.sched_setaffinity)


KERNEL: Final = KernelScheduler()


@dataclass(frozen=True)
class HostRoot:
    """The root that every host path hangs off.

    `debugfs` is where debugfs is mounted, a path as seen from `root` (D6: it may be a
    private mount). `scheduler` answers affinity questions.
    """

    root: str = "/"
    debugfs: str = "/sys/kernel/debug"
    scheduler: Scheduler = KERNEL
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
