"""Taking a lock of flock(2), and who holds it: for the message of a process that did not get it.

The kernel names the process in /proc/locks (proc_locks(5)); its cgroup says whether it is a service
of the node or a pod's. Nothing is decided by it: the process may have ended meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kata_pin.errors import KataPinError
from kata_pin.host.files import read_text
from kata_pin.host.process import read_process
from kata_pin.host.root import HOST, HostRoot

_POD: Final = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})\b")
"""A pod's uid in a cgroup's name; systemd's names have `_` in place of `-`."""

_UNIT: Final = re.compile(r"([^/\s]+\.(?:service|scope))\b")


@dataclass(frozen=True)
class Holder:
    """A process, and the pod or the unit that it belongs to; `pid` is 0 where nobody is known.

    `since` is when the process started, in local time; locks are taken at the start.
    """

    pid: int = 0
    pod: str = ""
    unit: str = ""
    since: str = ""

    def __str__(self) -> str:
        """Return ` (process 812 of kata-pin.service, since 2026-11-24 09:06:14)` or nothing."""
        owner = f" of pod {self.pod}" if self.pod else f" of {self.unit}" if self.unit else ""
        since = f", since {self.since}" if self.since else ""
        return f" (process {self.pid}{owner}{since})" if self.pid else ""


def open_locked(path: str, flags: int, taken: Callable[[Holder], KataPinError]) -> int:
    """Return the descriptor of a locked file, which a killed holder leaves unlocked.

    Raises what `taken` makes of its holder when another process has locked it, else OSError.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise taken(flock_holder(descriptor)) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def flock_holder(descriptor: int, root: HostRoot = HOST) -> Holder:
    """Return who has locked an open file."""
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        for line in read_text(root.proc("locks")).splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 812 00:19:1234 0 EOF
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == place:
                return _member(int(fields[4]), root)
    except (OSError, ValueError):
        pass
    return Holder()


def _member(pid: int, root: HostRoot) -> Holder:
    try:
        cgroups = read_text(root.proc(pid, "cgroup"))
    except OSError:
        cgroups = ""
    pod, units = _POD.search(cgroups), _UNIT.findall(cgroups)
    owner = pod[1].replace("_", "-") if pod else ""
    return Holder(max(0, pid), owner, units[-1] if units else "", _start(pid, root))


def _start(pid: int, root: HostRoot) -> str:
    """Return when a process started, in local time; empty if that cannot be read."""
    try:
        ticks = read_process(root, pid).key.starttime
    except KataPinError:
        return ""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - age))
