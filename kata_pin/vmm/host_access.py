"""How the vmm package reads the host, as Protocols: host/ is not imported here.

The daemon composes a HostAccess from kata_pin.host; it lives as long as the daemon, or one command.
Every reader raises TaskGone when the process is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kata_pin.calls import Calls
from kata_pin.model.thread import Process
from kata_pin.wire.proc import CgroupEntry, Cgroups, ExeFile


class HostPaths(Protocol):
    """Where the host's files hang (host.root.HostRoot)."""

    def __hash__(self) -> int: ...

    @property
    def live(self) -> bool:
        """Whether this is the running system and not a captured tree."""

    @property
    def calls(self) -> Calls:
        """The system calls that may need rights."""

    def path(self, absolute: str) -> str:
        """Return where an absolute path of the host is found."""

    def proc(self, *parts: str | int) -> str:
        """Return a path below /proc."""

    def debug(self, *parts: str | int) -> str:
        """Return a path below debugfs."""


class ProcessTable(Protocol):
    """All processes as of the last refresh (host.process.ProcessIndex)."""

    def get(self, pid: int) -> Process | None:
        """Return the process with this pid."""

    def all(self) -> Sequence[Process]:
        """Return all processes."""

    def children(self, ppid: int) -> Sequence[Process]:
        """Return the children of a process."""

    @property
    def kernel_workers(self) -> Mapping[int, Sequence[Process]]:
        """The kernel threads that wire.proc.kernel_worker knows, by the tid in their names."""


@dataclass(frozen=True)
class HostAccess:
    """The host's readers. The caller refreshes `processes`; the others read afresh each time.

    `cmdline` and `exe_file` may be answered from what was read before, because
    reading them can take for ever; they raise NotRead where that is not there. `why_not_roots`
    returns why somebody else than root may have put a process into a cgroup, empty for nobody.
    """

    root: HostPaths
    processes: ProcessTable
    read_process: Callable[[int], Process]
    cmdline: Callable[[int], Sequence[str]]
    exe: Callable[[int], tuple[str, bool]]
    exe_file: Callable[[int], ExeFile]
    cgroups: Callable[[int], Cgroups]
    why_not_roots: Callable[[CgroupEntry], str]
