"""Changes of the files that decide cpusets (D1).

inotify reports them; they are read again, and the sandboxes that they concern are marked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from asyncinotify import Mask

from kata_pin.base.errors import HostError, reason_of
from kata_pin.base.json_text import is_id
from kata_pin.base.placement import PassOutcome
from kata_pin.base.values import count
from kata_pin.engine.counters import Observer, Slices
from kata_pin.engine.node import NodeWatch
from kata_pin.engine.observe import Survey
from kata_pin.engine.sandboxes import MOST_REST_S, REST, Sandboxes
from kata_pin.follow.reports import Adoption
from kata_pin.linux.cgroups import cpuset_folders
from kata_pin.linux.events import cpu_changes
from kata_pin.linux.inotify import ARRIVED, Folder, KeyEvent, Watches
from kata_pin.placement.drift import touched
from kata_pin.records.containers import Registry
from kata_pin.rights.calls import DIRECT, Calls

log = logging.getLogger(__name__)


# Watched are Kata's state (sbs/<sandbox>/persist.json of the Go runtime, <sandbox>/state.json of
# runtime-rs, and sandboxes that appear and disappear), the kubelet's checkpoint, and the configured
# cpusets of the cgroups named by `watch_cpusets`. Kata rewrites persist.json in place, so only the
# close by its writer counts; the kubelet renames a new file over the old one. The kernel raises no
# event when it changes an effective cpuset.
#
# An event only says where to look (D1). When the kernel's queue overflows, or a file cannot be
# watched, everything must be read again. Descriptors are open only while `changes` runs.

MAX_CGROUPS: Final = 16  # most cgroups per sandbox, including ancestors

PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses after events were lost, longer each time, because everything must be read again."""

CALM_S: Final = 60.0  # after this long without a loss the pauses start from the first again

_ENTRIES: Final = ARRIVED | Mask.DELETE | Mask.MOVED_FROM
_WRITTEN: Final = Mask.CLOSE_WRITE | Mask.MOVED_TO | Mask.DELETE | Mask.MOVED_FROM
_SANDBOX: Final = _WRITTEN | Mask.DELETE_SELF | Mask.ONLYDIR | Mask.DONT_FOLLOW


@dataclass
class FileChanges:
    """What to read again; `everything` where watching began or events were lost."""

    everything: bool = False
    kubelet: bool = False
    claims: bool = False
    sandboxes: set[str] = field(default_factory=set)
    """Sandboxes whose state Kata wrote, or that appeared or disappeared."""
    cpusets: set[str] = field(default_factory=set)
    """Sandboxes with a cgroup whose cpuset was written."""

    def __bool__(self) -> bool:
        of_node = self.everything or self.kubelet or self.claims
        return of_node or bool(self.sandboxes or self.cpusets)


class _State(NamedTuple):
    """The folder of a sandbox that holds `file`."""

    file: str
    sandbox_id: str


class _Cpuset(NamedTuple):
    """The file of a cgroup's configured cpuset."""

    path: str


class StateWatch:
    """Watches the files; `overruns` counts how often the kernel dropped events.

    `vc` and `kata` are the state folders of the two runtimes, `kubelet` is the checkpoint's path,
    `claims` the folder of CDI specs.
    """

    def __init__(
        self, *, vc: str, kata: str, kubelet: str, claims: str, calls: Calls = DIRECT
    ) -> None:
        self._calls = calls
        self._places = {"persist.json": os.path.join(vc, "sbs"), "state.json": kata}
        self._kubelet = kubelet
        self._claims = claims
        self._cpusets: dict[str, dict[str, None]] = {}
        self._open: _Open | None = None
        self.overruns = 0

    @property
    def watched(self) -> int:
        """The number of watches."""
        return 0 if self._open is None else len(self._open.watches)

    async def changes(self) -> AsyncGenerator[FileChanges, None]:
        """Yield `everything` once watching, then what changed, until cancelled."""
        pauses = iter(PAUSES_S)
        while True:
            began = time.monotonic()
            try:
                with contextlib.closing(Watches(calls=self._calls)) as watches:
                    self._open = _Open(
                        watches, self._places, self._kubelet, self._claims, self._cpusets
                    )
                    yield FileChanges(everything=True)
                    while (events := await watches.next()) is not None:
                        changes = self._open.changes(events)
                        if changes:
                            yield changes
                self.overruns += 1
                log.warning("the kernel dropped file events; reading everything again")
            except OSError as error:
                log.warning(
                    "cannot watch files (%s); changes are seen only at the next audit",
                    error.strerror,
                )
            finally:
                self._open = None
            if time.monotonic() - began > CALM_S:
                pauses = iter(PAUSES_S)
            await asyncio.sleep(next(pauses, PAUSES_S[-1]))

    def watch_cpusets(self, sandbox_id: str, folders: Collection[str]) -> None:
        """Watch the configured cpusets in these cgroup folders for a sandbox, and no others.

        A cgroup that was removed and made again is a new file, and is watched again.
        """
        paths = [os.path.join(one, "cpuset.cpus") for one in itertools.islice(folders, MAX_CGROUPS)]
        for path, sandboxes in list(self._cpusets.items()):
            if path not in paths and sandbox_id in sandboxes:
                del sandboxes[sandbox_id]
                if not sandboxes:
                    del self._cpusets[path]
                    if self._open is not None:
                        self._open.leave_cpuset(path)
        for path in paths:
            self._cpusets.setdefault(path, {})[sandbox_id] = None
            if self._open is not None:
                self._open.watch_cpuset(path)

    def rearm(self) -> None:
        """Watch what exists now; audits call it in case an event was missed."""
        if self._open is not None:
            self._open.rearm()


class _Open:
    """What is watched until events are lost; `_known` has the sandboxes by state file."""

    def __init__(
        self,
        watches: Watches,
        places: Mapping[str, str],
        kubelet: str,
        claims: str,
        cpusets: Mapping[str, Collection[str]],
    ) -> None:
        folder, self._kubelet_name = os.path.split(kubelet)
        self.watches = watches
        self._places = {file: Folder(watches, path, _ENTRIES) for file, path in places.items()}
        self._kubelet = Folder(watches, folder, _WRITTEN)
        self._of_node = (self._kubelet, Folder(watches, claims, _WRITTEN))
        self._known: dict[str, set[_State]] = {file: set() for file in places}
        self._cpusets = cpusets
        self._inodes: dict[str, int] = {}
        for one in (*self._places.values(), *self._of_node):
            one.arm()
        self.rearm()

    def rearm(self) -> None:
        """Watch what exists now."""
        for folder in (*self._places.values(), *self._of_node):
            if not folder.current:
                folder.arm()
        for file in self._places:
            self._list(file)
        for path in self._cpusets:
            self.watch_cpuset(path)

    def changes(self, events: Iterable[KeyEvent]) -> FileChanges:
        """Return what a batch of events is about, and watch what appeared."""
        changes = FileChanges()
        for event in events:
            match event.key:
                case _State(file, sandbox_id) as key:
                    if event.lost:
                        self.watches.discard(key)
                    if event.lost or event.name == file:
                        changes.sandboxes.add(sandbox_id)
                case _Cpuset(path):
                    changes.cpusets.update(self._cpusets.get(path, ()))
                case Folder() as folder if folder in self._of_node:
                    moved = folder.moved(event)
                    if moved:
                        folder.arm()
                    if folder is self._kubelet:
                        changes.kubelet |= moved or event.name == self._kubelet_name
                    else:
                        changes.claims |= moved or event.name.endswith(".json")
                case Folder() as folder:
                    changes.sandboxes |= self._entries(folder, event)
        return changes

    # ---- sandboxes -----------------------------------------------------------------------

    def _entries(self, folder: Folder, event: KeyEvent) -> set[str]:
        """Return the sandboxes that an event of their folder is about."""
        file = next(file for file, one in self._places.items() if one is folder)
        if folder.moved(event):
            folder.arm()
            return self._list(file)
        if not (folder.exists and event.mask & Mask.ISDIR and is_id(event.name)):
            return set()
        key, known = _State(file, event.name), self._known[file]
        if not event.mask & ARRIVED:
            self.watches.discard(key)
            known.discard(key)
        elif self.watches.add(key, os.path.join(folder.path, event.name), _SANDBOX):
            known.add(key)
        return {event.name}

    def _list(self, file: str) -> set[str]:
        """Watch the sandboxes that exist and no others; return former and present ones."""
        folder, before = self._places[file], self._known[file]
        now = (
            {_State(file, one) for one in _folders(folder.path, self.watches.calls)}
            if folder.exists
            else set()
        )
        for key in before - now:
            self.watches.discard(key)
        self._known[file] = {
            key
            for key in now
            if self.watches.add(key, os.path.join(folder.path, key.sandbox_id), _SANDBOX)
        }
        return {key.sandbox_id for key in before | now}

    # ---- cpusets -------------------------------------------------------------------------

    def watch_cpuset(self, path: str) -> None:
        """Watch a cpuset file, unless this inode is watched already."""
        try:
            inode = os.stat(path).st_ino
        except OSError:
            self.leave_cpuset(path)
            return
        key = _Cpuset(path)
        if self._inodes.get(path) != inode or key not in self.watches:
            self._inodes[path] = inode
            self.watches.add(key, path, Mask.MODIFY)

    def leave_cpuset(self, path: str) -> None:
        """Stop watching a cpuset file."""
        self._inodes.pop(path, None)
        self.watches.discard(_Cpuset(path))


def _folders(path: str, calls: Calls) -> Iterator[str]:
    """Yield the entries that may be sandboxes: real folders whose names can be ids."""
    with contextlib.suppress(OSError):
        yield from filter(is_id, calls.folders(path))


# A write of a sandbox's Kata state asks for a pass even if nothing in it is new: Kata sets
# affinities and cpusets of its own then (D13). Nothing depends on events: audits call `look_around`
# and `rearm`.

SPACING_S: Final = 0.02
"""Least time between two reads of one sandbox's state, however often it is written."""

LOOK_S: Final = 0.5
"""How long a look for new VMMs waits for what is still to be read of processes."""

CPUSETS_FOLLOW_S: Final = (0.05, 0.5)
"""Passes after a CPU went on- or offline: Linux updates cpusets and affinities later."""

KATA: Final = "Kata's state"
KUBELET: Final = "the kubelet's checkpoint"
CLAIMS: Final = "DRA claims"
CPUSET: Final = "a written cpuset"
NODE: Final = "the node changed"
LOST: Final = "events of files were lost"


@dataclass
class CgroupWatch(Observer):
    """Watches the cpusets of the cgroups that sandboxes' threads are in."""

    _node: NodeWatch
    _watch: StateWatch
    _known: dict[str, frozenset[str]] = field(default_factory=dict)

    def passed(self, outcome: PassOutcome) -> None:
        """Watch the cgroups that a pass saw threads in, and those above them."""
        cgroups = frozenset(thread.task.cgroup for thread in outcome.report.threads)
        if cgroups != self._known.get(outcome.sandbox_id):
            self._known[outcome.sandbox_id] = cgroups
            self._watch.watch_cpusets(outcome.sandbox_id, self._folders(cgroups))

    def ended(self, outcome: PassOutcome) -> None:
        """Watch them no longer."""
        self._known.pop(outcome.sandbox_id, None)
        self._watch.watch_cpusets(outcome.sandbox_id, ())

    def _folders(self, cgroups: Iterable[str]) -> list[str]:
        mounts = self._node.cgroup_mounts
        found = (one for cgroup in sorted(cgroups) for one in cpuset_folders(mounts, cgroup))
        return list(dict.fromkeys(found))


@dataclass
class FileEvents:
    """Acts on what a StateWatch reports."""

    _node: NodeWatch
    _registry: Registry
    _adoption: Adoption
    _sandboxes: Sandboxes
    _watch: StateWatch
    _survey: Survey
    _recent: dict[str, float] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)
    _unknown: set[str] = field(default_factory=set)
    _look_due: asyncio.Event = field(default_factory=asyncio.Event)
    _looks: list[asyncio.TimerHandle] = field(default_factory=list)
    _began: bool = False

    def __post_init__(self) -> None:
        self._kubelet = self._node.kubelet
        self._node.changed()  # the present state is no change

    async def follow(self) -> None:
        """Act on changes until cancelled."""
        async for changes in self._watch.changes():
            with left_to_audits():
                self._take(changes)
            await asyncio.sleep(0)

    async def follow_cpus(self) -> None:
        """Ask for passes when CPUs go on- or offline; returns if the kernel sends no events."""
        try:
            async for _ in cpu_changes():
                with left_to_audits():
                    self._take_cpus()
        except HostError as error:
            log.warning("CPU hotplug is noticed only by audits: %s", error)

    async def look_around(self, unknown: Collection[str] = ()) -> None:
        """Record what Kata keeps of every sandbox that runs, new ones too.

        Also mark those of `unknown`, of which Kata wrote something, that are in the table.
        """
        running = await Slices().run(self._adoption.all(self._sandboxes.vmms))
        for sandbox_id, new in running.items():
            if new or self._sandboxes.cache(sandbox_id) is None:
                self._adopted(sandbox_id, new)
        for sandbox_id in unknown:
            if self._sandboxes.cache(sandbox_id) is not None:
                self._sandboxes.mark(sandbox_id, KATA)

    async def follow_starts(self) -> None:
        """Take in sandboxes that start, until cancelled.

        Anybody in a pod can start what looks like a VMM: however many do, one look at a time is
        under way, and a rest follows it that is longer than it took.
        """
        retry_s: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):  # then a process that hung is due again
                async with asyncio.timeout(retry_s):
                    await self._look_due.wait()
            self._look_due.clear()
            unknown, self._unknown = self._unknown, set()
            if not await self._survey.all(patience_s=LOOK_S):
                self._look_due.set()
            began = time.monotonic()
            with left_to_audits():
                await self.look_around(unknown)
            retry_s = self._survey.retry_s
            await asyncio.sleep(min((time.monotonic() - began) * REST, MOST_REST_S))

    def take_recorded(self, sandbox_id: str) -> int:
        """Record what Kata keeps of a sandbox that runs; return the ticket of a pass over it."""
        with left_to_audits():
            self._adoption.one(sandbox_id)
        return self._sandboxes.mark(sandbox_id, "start")

    def vmm_started(self) -> None:
        """Look around soon: nothing of Kata's says anything yet of a sandbox that is starting."""
        self._look_due.set()

    def look_at_node(self) -> None:
        """Ask for passes if the node changed unnoticed, or the last ones failed; for audits."""
        if self._node.changed():
            self._sandboxes.mark_all(NODE)
        self._sandboxes.mark_unfinished()

    def _take(self, changes: FileChanges) -> None:
        if changes.everything:
            self._look_at_everything()
            return
        self._take_states(changes.sandboxes)
        for sandbox_id in changes.cpusets:
            if self._sandboxes.cache(sandbox_id) is not None:  # it may be over by now
                self._sandboxes.mark(sandbox_id, CPUSET, event=False)
        if changes.kubelet:
            self._take_checkpoint()
        if changes.claims and self._node.read_claims():
            self._sandboxes.mark_all(CLAIMS)

    def _look_at_everything(self) -> None:
        """Look at everything: watching began, or events were lost.

        At the start passes are due anyway, and see what was written before them.
        """
        self._look_due.set()
        self._take_checkpoint()
        self._node.read_claims()
        if self._began:
            self._sandboxes.mark_all(LOST)
        self._began = True

    def _take_states(self, sandbox_ids: Collection[str]) -> None:
        """Read the state of these sandboxes now, or a little later if it was read just now."""
        now = time.monotonic()
        loop = asyncio.get_running_loop()
        due = []
        for sandbox_id in sandbox_ids:
            wait_s = self._recent.get(sandbox_id, 0.0) + SPACING_S - now
            if wait_s <= 0:
                due.append(sandbox_id)
            elif sandbox_id not in self._waiting:
                self._waiting.add(sandbox_id)
                loop.call_later(wait_s, self._take_late, sandbox_id)
        self._read(due)

    def _take_late(self, sandbox_id: str) -> None:
        self._waiting.discard(sandbox_id)
        with left_to_audits():
            self._read([sandbox_id])

    def _read(self, sandbox_ids: Collection[str]) -> None:
        """Record the state of those with a known VMM; look for the VMMs of the others soon."""
        vmms, now = self._sandboxes.vmms, time.monotonic()
        for sandbox_id in [key for key, at in self._recent.items() if at + SPACING_S < now]:
            del self._recent[sandbox_id]
        for sandbox_id in sandbox_ids:
            self._recent[sandbox_id] = now
            if sandbox_id in vmms:
                self._adopted(sandbox_id, self._adoption.one(sandbox_id))
            else:
                self._unknown.add(sandbox_id)
                self._look_due.set()

    def _adopted(self, sandbox_id: str, new: int) -> None:
        if new:
            what = count(new, "container")
            log.info("sandbox %s: %s updated from Kata's state", sandbox_id, what)
        self._sandboxes.mark(sandbox_id, KATA)

    def _take_checkpoint(self) -> None:
        """Mark what a changed checkpoint is about: its pods before the others."""
        before, now = self._kubelet, self._node.kubelet
        if before == now:
            return
        self._kubelet = now
        pods, everybody = touched(before, now)
        log.info("kubelet checkpoint changed for %s", count(len(pods), "pod"))
        for sandbox_id in self._sandboxes.ids:
            if self._is_of(sandbox_id, pods):
                self._sandboxes.mark(sandbox_id, KUBELET)
        if everybody:
            self._sandboxes.mark_all(KUBELET)

    def _take_cpus(self) -> None:
        """Mark all, and once more when cpusets have followed.

        Also if the online CPUs are the same: a CPU that went and came back lost its threads.
        """
        if self._node.changed():
            log.info("online CPUs changed to %s", self._node.current().topology.online)
        self._sandboxes.mark_all(NODE)
        for look in self._looks:
            look.cancel()
        loop = asyncio.get_running_loop()
        self._looks = [
            loop.call_later(wait_s, self._sandboxes.mark_all, NODE) for wait_s in CPUSETS_FOLLOW_S
        ]

    def _is_of(self, sandbox_id: str, pods: Collection[str]) -> bool:
        return any(one.pod_uid in pods for one in self._registry.containers(sandbox_id))


@contextlib.contextmanager
def left_to_audits() -> Iterator[None]:
    """Log a change that cannot be handled now: the next audit looks again."""
    try:
        yield
    except Exception as error:  # a fault barrier: one sandbox's files must not stop the others
        log.error("cannot handle a change now, the next audit will: %s", reason_of(error))
        log.debug("cannot handle a change", exc_info=True)
