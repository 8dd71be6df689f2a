"""Changes of the files that say something about containers' CPUs, by inotify.

Watched are Kata's state (sbs/<sandbox>/persist.json of the Go runtime, <sandbox>/state.json of
runtime-rs, and sandboxes that appear and disappear), the kubelet's checkpoint, and the configured
cpusets of the cgroups named by `watch_cpusets`. Kata rewrites persist.json in place, so only the
close by its writer counts; the kubelet renames a new file over the old one. The kernel raises no
event when it changes an effective cpuset.

An event only says where to look (D1). When the kernel's queue overflows, or a file cannot be
watched, everything must be read again. Descriptors are open only while `changes` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import stat
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from asyncinotify import Mask

from kata_pin.calls import DIRECT, Calls
from kata_pin.sources.watches import ARRIVED, Folder, KeyEvent, Watches
from kata_pin.wire.ids import is_id

log = logging.getLogger(__name__)

MAX_LISTED: Final = 16384  # most entries that are read of one of Kata's folders
MAX_CGROUPS: Final = 16  # most cgroups per sandbox, including ancestors

PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses after events were lost, longer each time, because everything must be read again."""

CALM_S: Final = 60.0  # after this long without a loss the pauses start from the first again

_ENTRIES: Final = ARRIVED | Mask.DELETE | Mask.MOVED_FROM
_WRITTEN: Final = Mask.CLOSE_WRITE | Mask.MOVED_TO | Mask.DELETE | Mask.MOVED_FROM
_SANDBOX: Final = _WRITTEN | Mask.DELETE_SELF | Mask.ONLYDIR | Mask.DONT_FOLLOW


@dataclass
class Changes:
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

    async def changes(self) -> AsyncGenerator[Changes, None]:
        """Yield `everything` once watching, then what changed, until cancelled."""
        pauses = iter(PAUSES_S)
        while True:
            began = time.monotonic()
            try:
                with contextlib.closing(Watches(calls=self._calls)) as watches:
                    self._open = _Open(
                        watches, self._places, self._kubelet, self._claims, self._cpusets
                    )
                    yield Changes(everything=True)
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
        self._claims = Folder(watches, claims, _WRITTEN)
        self._of_node = (self._kubelet, self._claims)
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

    def changes(self, events: Iterable[KeyEvent]) -> Changes:
        """Return what a batch of events is about, and watch what appeared."""
        changes = Changes()
        for event in events:
            match event.key:
                case _State(file, sandbox_id) as key:
                    if event.lost:
                        self.watches.discard(key)
                    if event.lost or event.name == file:
                        changes.sandboxes.add(sandbox_id)
                case _Cpuset(path):
                    changes.cpusets.update(self._cpusets.get(path, ()))
                case Folder() as folder if folder is self._kubelet:
                    moved = folder.moved(event)
                    if moved:
                        folder.arm()
                    changes.kubelet |= moved or event.name == self._kubelet_name
                case Folder() as folder if folder is self._claims:
                    moved = folder.moved(event)
                    if moved:
                        folder.arm()
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
    try:
        names = calls.listdir(path)[:MAX_LISTED]
    except OSError:
        return
    for name in filter(is_id, names):
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(calls.lstat(os.path.join(path, name)).mode):
                yield name
