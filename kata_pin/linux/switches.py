"""Recording the task switches of pCPUs, and who the tasks were."""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Final, Self

from kata_pin.base.counters import CROWD, IDLE_TASK, CpuWindow, Measured, SeenTask
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import HostError, ParseError
from kata_pin.base.values import Method
from kata_pin.linux.cgroup_mounts import read_cgroups
from kata_pin.linux.files import HostRoot, read_bytes, read_once
from kata_pin.linux.perf import (
    DEAD,
    Came,
    Event,
    Forked,
    Left,
    Ran,
    Ring,
    RunSlices,
    TaskNamed,
    parse_records,
)
from kata_pin.linux.proc import MAX_CGROUP, Cgroups, parse_stat, status_field
from kata_pin.linux.tasks import get_affinity
from kata_pin.linux.topology import online

# The tasks that ran in a window, looked at while they live.

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
            elif isinstance(event, TaskNamed) and len(self._names) < MOST_REMEMBERED:
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
            if tid not in {IDLE_TASK, DEAD} and len(self._found) < MOST_LOOKED_AT:
                self._found[tid] = self._task(tid, pid)
        return bool(self._new)

    def tasks(self, tids: Collection[int]) -> Mapping[int, SeenTask]:
        """Return what is known of these tasks."""
        return {
            tid: self._found.get(tid) or SeenTask(tid, 0, self._names.get(tid, ""))
            for tid in tids
            if tid not in {IDLE_TASK, CROWD, DEAD}
        }

    def _task(self, tid: int, pid: int) -> SeenTask:
        return look_at(self._root, tid, pid) or SeenTask(
            tid,
            pid,
            self._names.get(tid, ""),
            parent=self._parent(tid),
            process=self._names.get(pid, ""),
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
    group = status_field(status, "Tgid") or ""
    pid = pid or (int(group) if group.isdecimal() else tid)
    process = stat.comm
    if pid != tid:
        with suppress(OSError, ParseError):
            process = parse_stat(read_once(root.proc(pid, "stat"))).comm
    return SeenTask(
        tid,
        pid,
        stat.comm,
        stat.flags,
        affinity,
        cgroup,
        by_root=set((status_field(status, "Uid") or "").split()) == {"0"},
        process=process,
    )


def shown_cgroup(cgroups: Cgroups) -> str:
    """Return the path that names a task's unit or container best.

    That is the one of cgroup v2, unless everything is in its root; then systemd's, then the others.
    """
    by_name = {name: one.path for one in cgroups.entries for name in one.controllers}
    unified = cgroups.unified.path if cgroups.unified else ""
    paths = (unified, by_name.get("name=systemd", ""), by_name.get("cpuset", ""), *by_name.values())
    return next((path for path in paths if path.strip("/")), "/" if cgroups.entries else "")


# Recording the task switches of some pCPUs by perf's ring buffers.
#
# > with SwitchRecorder(root, cpus, seconds) as recorder:
# > while recorder.left_s > 0:
# > recorder.wait()          # or sleep elsewhere for at most DRAIN_S
# > recorder.drain()
# > measured = recorder.end()
#
# Nothing is left behind in the kernel when this process dies. Tasks are looked at soon after they
# ran, because their names are gone with them.

DRAIN_S: Final = 0.1
"""How often rings are read: names are kept, and 10,000 switches a second fit in between."""

RING_BYTES: Final = 256 * 1024
"""6,500 records; any user may lock so much for each pCPU (kernel.perf_event_mlock_kb)."""

PARTS: Final = 60
"""Parts of a window whose run times are told apart."""


class _Recorded:
    """A ring of switches; `records` counts those that were read, `torn` says what was not whole.

    `pending`: records may be lost of which the kernel tells with the next one, if there is any.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.records = 0
        self.torn = ""
        self.pending = False

    def events(self) -> tuple[Event, ...]:
        """Return what was recorded since the last call."""
        try:
            found = parse_records(self.ring.read())
        except ParseError as error:
            self.torn = error.message
            return ()
        self.records += found.records
        self.pending = self.ring.full or (self.pending and not found.events)
        return found.events


class SwitchRecorder:
    """Records one window of some pCPUs."""

    def __init__(
        self, root: HostRoot, cpus: CpuSet, seconds: float, *, ring_bytes: int = RING_BYTES
    ) -> None:
        """Start recording. Raises HostError where the kernel does not allow it at all.

        A single pCPU of which that is not possible, because it is offline, has that as its problem.
        """
        self._root = root
        self._seconds = seconds
        self._rings: dict[int, _Recorded] = {}
        self._problems: dict[int, str] = {}
        self._slices: dict[int, RunSlices] = {}
        self._seen = TasksSeen(root)
        self._poll = select.poll()
        self._reader_ns = 0
        self._stack = ExitStack()
        with ExitStack() as opening:
            self._open(opening, cpus, ring_bytes)
            self._stack = opening.pop_all()
        self._start = time.monotonic_ns()
        for cpu, one in self._rings.items():
            one.ring.enable()
            length = int(seconds * 1e9)
            self._slices[cpu] = RunSlices(cpu, time.monotonic_ns(), length, PARTS)

    def _open(self, opening: ExitStack, cpus: CpuSet, ring_bytes: int) -> None:
        refusal: OSError | None = None
        for cpu in cpus:
            try:
                ring = Ring(self._root.calls.switches(cpu), ring_bytes)
            except OSError as error:
                refusal = error
                self._problems[cpu] = f"its switches cannot be recorded: {error.strerror}"
                continue
            opening.callback(ring.close)
            self._rings[cpu] = _Recorded(ring)
            self._poll.register(ring.fd, select.POLLIN)
        if refusal is not None and not self._rings:
            raise refused(f"pCPU{'s' * (len(cpus) > 1)} {cpus}", refusal) from refusal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def left_s(self) -> float:
        """Seconds until the window is as long as it shall be."""
        return self._seconds - (time.monotonic_ns() - self._start) / 1e9

    def wait(self) -> None:
        """Sleep until it is time to drain, or a ring is a quarter full."""
        self._poll.poll(max(0.0, min(DRAIN_S, self.left_s)) * 1000)

    def drain(self, most: int = MOST_LOOKED_AT) -> bool:
        """Read every ring, and look at so many new tasks; return whether there are more."""
        began = time.thread_time_ns()
        for cpu, one in self._rings.items():
            events = one.events()
            self._slices[cpu].add(events)
            self._seen.note(events)
        more = self._seen.look(most)
        self._reader_ns += time.thread_time_ns() - began
        return more

    def end(self) -> Measured:
        """Stop recording, and return what was recorded."""
        ends = {}
        for cpu, one in self._rings.items():
            ends[cpu] = time.monotonic_ns()
            one.ring.disable()
        self.drain()
        still = online(self._root)
        windows = {
            cpu: self._slices[cpu].end(
                ends[cpu], one.records, _problem(one, is_online=cpu in still)
            )
            for cpu, one in self._rings.items()
        }
        now = time.monotonic_ns()
        for cpu, problem in self._problems.items():
            windows[cpu] = CpuWindow(cpu, self._start, now, problem=problem)
        ran = {task.tid for window in windows.values() for task in window.tasks}
        return Measured(
            Method.PERF,
            windows,
            self._seen.tasks(ran),
            parts=PARTS,
            reader_ns=self._reader_ns,
        )


def refused(cpus: str, error: OSError) -> HostError:
    """Return the error of pCPUs whose switches the kernel does not let us record."""
    hint = (
        "needs root, or CAP_PERFMON and kernel.perf_event_paranoid of at most 2, "
        "and a seccomp filter that allows perf_event_open"
    )
    return HostError("open a perf event of", cpus, error.errno or 0, hint=hint)


def _problem(one: _Recorded, *, is_online: bool) -> str:
    """Return why a ring does not have everything, empty where nothing shows."""
    if one.pending:
        return "records were lost at its end"
    return one.torn or ("" if is_online else "it is offline")
