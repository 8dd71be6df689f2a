"""`doctor`: whether cgroups are visible: without, no cpuset is known, and pins may not be possible.

In a container they are only if it has the host's cgroups and process numbers (ADR 17).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kata_pin.cli.reports import remedies, words
from kata_pin.errors import TaskGone
from kata_pin.host import process
from kata_pin.host.cgroup_mounts import CgroupMount, cgroup_mounts
from kata_pin.host.root import HostRoot
from kata_pin.model.reports.doctor import Row
from kata_pin.model.reports.state import State
from kata_pin.remedy import here


def cgroups(root: HostRoot, state: State | None) -> Iterator[Row]:
    """Yield the cgroup hierarchies with cpusets, and whose cgroups cannot be seen in them."""
    mounts = cgroup_mounts(root)
    if not mounts:
        yield Row("cgroups", "warn", "no cpuset hierarchy is mounted", here(remedies.CGROUPS))
        return
    processes = {1: ("", "process 1")}
    for one in state.sandboxes if state else ():
        if one.vmm is not None:
            processes[one.vmm.pid] = (words.owner(one), f"the VMM, process {one.vmm.pid},")
    unseen = False
    for pid, (sandbox, name) in processes.items():
        cgroup = _unseen_cgroup(root, mounts, pid)
        if cgroup:
            unseen = True
            text = f"the cgroup of {name} is not visible ({cgroup}): its cpuset is unknown"
            yield Row("cgroups", "fail", text, here(remedies.CGROUPS), sandbox)
    if not unseen:
        shown = ", ".join(f"{'v1' if m.v1 else 'v2'} at {m.point}" for m in mounts)
        yield Row("cgroups", "ok", shown)


def _unseen_cgroup(root: HostRoot, mounts: Sequence[CgroupMount], pid: int) -> str:
    """Return a process's cgroup if no mount shows it; empty if one does, or the process ended."""
    try:
        entry = process.cgroups(root, pid).cpuset
    except TaskGone:
        return ""
    if entry is None:
        return ""
    if any(m.folder(entry.path) for m in mounts if m.v1 == bool(entry.controllers)):
        return ""
    return entry.path
