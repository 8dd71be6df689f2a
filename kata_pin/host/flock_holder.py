"""Who holds a lock of flock(2): for the message of a process that did not get it.

The kernel names the process in /proc/locks (proc_locks(5)); its cgroup says whether it is a service
of the node or a pod's. Nothing is decided by it: the process may have ended meanwhile.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from kata_pin.host.files import read_text
from kata_pin.host.root import HOST, HostRoot

_POD: Final = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})\b")
"""A pod's uid in a cgroup's name; systemd's names have `_` in place of `-`."""

_UNIT: Final = re.compile(r"([^/\s]+\.(?:service|scope))\b")


@dataclass(frozen=True)
class Holder:
    """A process, and the pod or the unit that it belongs to; `pid` is 0 where nobody is known."""

    pid: int = 0
    pod: str = ""
    unit: str = ""

    def __str__(self) -> str:
        """Return ` (process 812 of kata-pin.service)`, empty where nobody is known."""
        owner = f" of pod {self.pod}" if self.pod else f" of {self.unit}" if self.unit else ""
        return f" (process {self.pid}{owner})" if self.pid else ""


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
        return Holder(max(0, pid))
    pod, units = _POD.search(cgroups), _UNIT.findall(cgroups)
    return Holder(pid, pod[1].replace("_", "-") if pod else "", units[-1] if units else "")
