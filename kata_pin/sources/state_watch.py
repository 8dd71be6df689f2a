"""Changes of the files that say something about containers' CPUs, by inotify.

    async for changes in watch.changes():      # until cancelled
        ...                                    # read again what `changes` names

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
import time
from collections.abc import AsyncGenerator, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from asyncinotify import Mask

from kata_pin.sources.watches import ARRIVED, Folder, KeyEvent, Watches
from kata_pin.wire.ids import is_id

log = logging.getLogger(__name__)

MAX_LISTED: Final = 16384
"""Most entries that are read of one of Kata's folders."""

MAX_CGROUPS: Final = 16
"""Most cgroups per sandbox, including ancestors."""

PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses after events were lost, longer each time, because everything must be read again."""

CALM_S: Final = 60.0
"""After this long without a loss the pauses start from the first again."""

_ENTRIES: Final = ARRIVED | Mask.DELETE | Mask.MOVED_FROM
_WRITTEN: Final = Mask.CLOSE_WRITE | Mask.MOVED_TO | Mask.DELETE | Mask.MOVED_FROM
_SANDBOX: Final = _WRITTEN | Mask.DELETE_SELF | Mask.ONLYDIR | Mask.DONT_FOLLOW


@dataclass
class Changes:
    """What to read again; `everything` where watching began or events were lost."""

    everything: bool = False
    kubelet: bool = False
    sandboxes: set[str] = field(default_factory=set)
    """Sandboxes whose state Kata wrote, or that appeared or disappeared."""
    cpusets: set[str] = field(default_factory=set)
    """Sandboxes with a cgroup whose cpuset was written."""

    def __bool__(self) -> bool:
        return self.everything or self.kubelet or bool(self.sandboxes or self.cpusets)


@dataclass(frozen=True, slots=True)
class _State:
    """The folder of a sandbox that holds `file`."""

    file: str
    sandbox_id: str


@dataclass(frozen=True, slots=True)
class _Cpuset:
    """The file of a cgroup's configured cpuset."""

    path: str


class StateWatch:
    """Watches the files; `overruns` counts how often the kernel dropped events.

    `vc` and `kata` are the state folders of the two runtimes, `kubelet` is the checkpoint's path.
    """

    def __init__(self, *, vc: str, kata: str, kubelet: str) -> None:
        self._places = {"persist.json": os.path.join(vc, "sbs"), "state.json": kata}
        self._kubelet_folder, self._kubelet_name = os.path.split(kubelet)
        self._cpusets: dict[str, dict[str, None]] = {}
        self._inodes: dict[str, int] = {}
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
                watches = Watches()
                with contextlib.closing(watches):
                    self._start(watches)
                    yield Changes(everything=True)
                    async with contextlib.aclosing(self._follow(watches)) as followed:
                        async for changes in followed:
                            yield changes
            except OSError as error:
                log.warning(
                    "cannot watch files (%s); changes are seen only at the next audit",
                    error.strerror,
                )
            finally:
                self._open = None
                self._inodes.clear()
            if time.monotonic() - began > CALM_S:
                pauses = iter(PAUSES_S)
            await asyncio.sleep(next(pauses, PAUSES_S[-1]))

    def watch_cpusets(self, sandbox_id: str, folders: Collection[str]) -> None:
        """Watch the configured cpusets in these cgroup folders for a sandbox, and no others.

        A cgroup that was removed and made again is a new file, and is watched again.
        """
        paths = [os.path.join(one, "cpuset.cpus") for one in itertools.islice(folders, MAX_CGROUPS)]
        for path in [one for one, ids in self._cpusets.items() if sandbox_id in ids]:
            if path not in paths:
                self._leave(path, sandbox_id)
        for path in paths:
            self._cpusets.setdefault(path, {})[sandbox_id] = None
            self._watch_cpuset(path)

    def rearm(self) -> None:
        """Watch what exists now; audits call it in case an event was missed."""
        if self._open is None:
            return
        for folder in self._open.all:
            if not folder.current:
                folder.arm()
        for file, folder in self._open.places.items():
            self._list(file, folder)
        for path in self._cpusets:
            self._watch_cpuset(path)

    # ---- the loop ------------------------------------------------------------------------

    def _start(self, watches: Watches) -> None:
        places = {file: Folder(watches, path, _ENTRIES) for file, path in self._places.items()}
        self._open = _Open(watches, places, Folder(watches, self._kubelet_folder, _WRITTEN))
        for folder in self._open.all:
            folder.arm()
        for file, folder in places.items():
            self._list(file, folder)
        for path in self._cpusets:
            self._watch_cpuset(path)

    async def _follow(self, watches: Watches) -> AsyncGenerator[Changes, None]:
        """Yield changes until events are lost."""
        while (events := await watches.next()) is not None:
            changes = Changes()
            for one in events:
                self._take(one, changes)
            if changes:
                yield changes
        self.overruns += 1
        log.warning("the kernel dropped file events; reading everything again")

    def _take(self, event: KeyEvent, changes: Changes) -> None:
        assert self._open is not None, "events come from what is open"
        match event.key:
            case _State(file, sandbox_id) as key:
                if event.lost:
                    self._open.watches.discard(key)
                if event.lost or event.name == file:
                    changes.sandboxes.add(sandbox_id)
            case _Cpuset(path):
                changes.cpusets.update(self._cpusets.get(path, ()))
            case Folder() as folder if folder is self._open.kubelet:
                moved = folder.moved(event)
                if moved:
                    folder.arm()
                changes.kubelet |= moved or event.name == self._kubelet_name
            case Folder() as folder:
                file = self._open.file_of(folder)
                if folder.moved(event):
                    folder.arm()
                    changes.sandboxes |= self._list(file, folder)
                elif folder.exists and event.mask & Mask.ISDIR and is_id(event.name):
                    self._entry(file, folder, event)
                    changes.sandboxes.add(event.name)

    # ---- sandboxes -----------------------------------------------------------------------

    def _entry(self, file: str, folder: Folder, event: KeyEvent) -> None:
        """Watch a sandbox's folder that appeared; forget one that disappeared."""
        assert self._open is not None
        key, known = _State(file, event.name), self._open.known[file]
        if not event.mask & ARRIVED:
            self._open.watches.discard(key)
            known.discard(key)
        elif self._open.watches.add(key, os.path.join(folder.path, event.name), _SANDBOX):
            known.add(key)

    def _list(self, file: str, folder: Folder) -> set[str]:
        """Watch the sandboxes that exist and no others; return former and present ones."""
        assert self._open is not None
        watches, before = self._open.watches, self._open.known[file]
        now = {_State(file, one) for one in _folders(folder.path)} if folder.exists else set()
        for key in before - now:
            watches.discard(key)
        self._open.known[file] = {
            key
            for key in now
            if watches.add(key, os.path.join(folder.path, key.sandbox_id), _SANDBOX)
        }
        return {key.sandbox_id for key in before | now}

    # ---- cpusets -------------------------------------------------------------------------

    def _watch_cpuset(self, path: str) -> None:
        """Watch a cpuset file, unless this inode is watched already."""
        if self._open is None:
            return
        try:
            inode = os.stat(path).st_ino
        except OSError:
            inode = 0
        key = _Cpuset(path)
        if inode and self._inodes.get(path) == inode and key in self._open.watches:
            return
        self._inodes[path] = inode
        if not inode:
            self._open.watches.discard(key)
        else:
            self._open.watches.add(key, path, Mask.MODIFY)

    def _leave(self, path: str, sandbox_id: str) -> None:
        self._cpusets[path].pop(sandbox_id, None)
        if not self._cpusets[path]:
            del self._cpusets[path]
            self._inodes.pop(path, None)
            if self._open is not None:
                self._open.watches.discard(_Cpuset(path))


class _Open:
    """What is watched until events are lost; `known` has the sandboxes by file name."""

    def __init__(self, watches: Watches, places: dict[str, Folder], kubelet: Folder) -> None:
        self.watches = watches
        self.places = places
        self.kubelet = kubelet
        self.known: dict[str, set[_State]] = {file: set() for file in places}

    @property
    def all(self) -> tuple[Folder, ...]:
        """Every folder that is watched by its name."""
        return (*self.places.values(), self.kubelet)

    def file_of(self, folder: Folder) -> str:
        """Return the name of the state file in the sandboxes of this folder."""
        return next(file for file, one in self.places.items() if one is folder)


def _folders(path: str) -> Iterator[str]:
    """Yield the entries that may be sandboxes: real folders whose names can be ids."""
    try:
        with os.scandir(path) as entries:
            for entry in itertools.islice(entries, MAX_LISTED):
                if is_id(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield entry.name
    except OSError:
        return
