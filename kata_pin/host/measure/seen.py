"""The tasks that ran in a window, looked at while they live."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Final

from kata_pin.errors import HostError, ParseError
from kata_pin.host.cgroup_mounts import read_cgroups
from kata_pin.host.files import read_bytes, read_once
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import get_affinity
from kata_pin.model.measured.windows import CROWD, IDLE, SeenTask
from kata_pin.wire.kernel.perf import DEAD, Came, Event, Forked, Left, Named, Ran
from kata_pin.wire.proc import MAX_CGROUP, Cgroups, parse_stat, status_field

MOST_LOOKED_AT: Final = 4096
"""Most tasks of one window that are looked at, which takes some 70 us each."""

MOST_REMEMBERED: Final = 16384
"""Most names and parents that are kept from records."""


class TasksSeen:
    """Collects what is known of tasks: from /proc, and from records where they are gone."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._found: dict[int, SeenTask] = {}
        self._new: dict[int, int] = {}
        """The process of each task that was not looked at yet."""
        self._names: dict[int, str] = {}
        self._parents: dict[int, int] = {}

    def note(self, events: Iterable[Event]) -> None:
        """Remember whom records name."""
        found, new = self._found, self._new
        for event in events:
            kind = type(event)
            if kind is Left or kind is Ran:
                assert isinstance(event, Left | Ran)
                if event.tid not in found and event.tid not in new:
                    new[event.tid] = event.pid
            elif isinstance(event, Came):
                if event.from_tid not in found and event.from_tid not in new:
                    new[event.from_tid] = event.from_pid
            elif isinstance(event, Named) and len(self._names) < MOST_REMEMBERED:
                self._names[event.tid] = event.comm
            elif isinstance(event, Forked) and len(self._parents) < MOST_REMEMBERED:
                self._parents[event.tid] = event.parent_pid

    def note_tids(self, tids: Iterable[int]) -> None:
        """Remember tasks of which only the number is known."""
        for tid in tids:
            if tid not in self._found:
                self._new.setdefault(tid, 0)

    def look(self, most: int = MOST_LOOKED_AT) -> bool:
        """Look at so many of the tasks that are new; return whether there are more."""
        for tid in list(islice(self._new, most)):
            pid = self._new.pop(tid)
            if tid not in {IDLE, DEAD} and len(self._found) < MOST_LOOKED_AT:
                self._found[tid] = self._task(tid, pid)
        return bool(self._new)

    def tasks(self, tids: Collection[int]) -> Mapping[int, SeenTask]:
        """Return what is known of these tasks."""
        return {
            tid: self._found.get(tid) or SeenTask(tid, 0, self._names.get(tid, ""))
            for tid in tids
            if tid not in {IDLE, CROWD, DEAD}
        }

    def _task(self, tid: int, pid: int) -> SeenTask:
        return look_at(self._root, tid, pid) or SeenTask(
            tid, pid, self._names.get(tid, ""), parent=self._parent(tid)
        )

    def _parent(self, tid: int) -> str:
        parent = self._parents.get(tid)
        if parent is None:
            return ""
        name = self._names.get(parent, "")
        with suppress(OSError, ParseError):
            name = parse_stat(read_once(self._root.proc(parent, "stat"))).comm
        return f"{name} (pid {parent})" if name else f"pid {parent}"


def look_at(root: HostRoot, tid: int, pid: int = 0) -> SeenTask | None:
    """Return a task as it is now, None if it is gone; `pid` is its process."""
    try:
        stat = parse_stat(read_once(root.proc(tid, "stat")))
        affinity = get_affinity(tid, root)
    except (OSError, HostError, ParseError):
        return None
    cgroup = ""
    with suppress(OSError, HostError, ParseError):
        cgroup = shown_cgroup(read_cgroups(root, read_bytes(root.proc(tid, "cgroup"), MAX_CGROUP)))
    status = b""
    with suppress(OSError):
        status = read_bytes(root.proc(tid, "status"))
    process = status_field(status, "Tgid") or ""
    return SeenTask(
        tid,
        pid or (int(process) if process.isdecimal() else tid),
        stat.comm,
        stat.flags,
        affinity,
        cgroup,
        by_root=set((status_field(status, "Uid") or "").split()) == {"0"},
    )


def shown_cgroup(cgroups: Cgroups) -> str:
    """Return the path that names a task's unit or container best.

    That is the one of cgroup v2, unless everything is in its root; then systemd's, then the others.
    """
    by_name = {name: one.path for one in cgroups.entries for name in one.controllers}
    unified = cgroups.unified.path if cgroups.unified else ""
    paths = (unified, by_name.get("name=systemd", ""), by_name.get("cpuset", ""), *by_name.values())
    return next((path for path in paths if path.strip("/")), "/" if cgroups.entries else "")
