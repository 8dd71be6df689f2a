"""Inotify watches: one folder followed for ever, or a bounded set of them under the caller's keys.

One inode may be watched under several keys (an ancestor of two folders); each key gets the events
it asked for. A key whose folder disappears gets one last event and then watches nothing. Files of
cgroups are different: they disappear without an event (measured on Linux 6.18), so their owner
discards them. Facts: inotify(7).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import stat
from collections.abc import AsyncGenerator, Callable, Hashable
from pathlib import Path
from typing import Final

from asyncinotify import Event, Inotify, Mask, Watch
from msgspec import Struct

from kata_pin.rights.calls import DIRECT, Calls

log = logging.getLogger(__name__)

MAX_WATCHES: Final = 16384
"""Most watches of one set: twice what a full node needs, some six per sandbox."""

BATCH: Final = 128
"""Most events that are returned at once; the event loop gets a turn between two batches."""

CACHED: Final = 64  # events with names of the greatest length that one read takes

LOST: Final = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT | Mask.IGNORED
"""The events that end a watch: its file or folder is no longer there under its name."""

ARRIVED: Final = Mask.CREATE | Mask.MOVED_TO

_ANCESTOR: Final = ARRIVED | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
_MAX_STEPS: Final = 64  # folders of a path that may appear while it is being watched


async def folder_events(
    path: str, mask: Mask, *, retry_s: float, level: int, prepare: Callable[[], None] | None = None
) -> AsyncGenerator[str, None]:
    """Yield the name of each entry of a folder that an event is about, for ever.

    An empty name means that any entry may have changed: when watching begins, after events were
    lost, and when the folder was replaced. A folder that cannot be watched is logged with `level`
    once and tried again every `retry_s` seconds; `prepare` runs before each try.
    """
    shown = level
    while True:
        try:
            with Inotify() as inotify:
                if prepare is not None:
                    prepare()
                inotify.add_watch(path, mask | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR)
                shown = level
                yield ""
                async for event in inotify:
                    if event.mask & LOST:
                        break
                    yield "" if event.name is None else str(event.name)
        except OSError as error:
            log.log(shown, "cannot watch %s: %s; retrying", path, error.strerror)
            shown = logging.DEBUG
            await asyncio.sleep(retry_s)


class KeyEvent(Struct, frozen=True):
    """An event of what `key` watches; `name` is the entry of a folder, else empty."""

    key: Hashable
    name: str
    mask: Mask

    @property
    def lost(self) -> bool:
        """Whether what was watched is no longer there under its name."""
        return bool(self.mask & LOST)


class _Inotify(Inotify):
    """An instance that is told by other calls what to watch."""

    __slots__ = ("_calls",)

    def __init__(self, calls: Calls) -> None:
        super().__init__(cache_size=CACHED, sync_timeout=0)
        self._calls = calls

    def add_watch(self, path: os.PathLike[str] | bytes | str, mask: Mask) -> Watch:
        """Watch a path; as the library does it."""
        number = self._calls.add_watch(self.fd, os.fsdecode(path), int(mask))
        watch = self._watches.get(number)
        if watch is None:
            watch = Watch(inotify=self, path=Path(os.fsdecode(path)), mask=mask, wd=number)
            self._watches[number] = watch
        return watch


class Watches:
    """The set, until `close`; raises OSError when the kernel has no inotify instance left.

    `calls` may have the rights to watch.
    """

    def __init__(self, limit: int = MAX_WATCHES, calls: Calls = DIRECT) -> None:
        self.calls = calls
        self._inotify = _Inotify(calls)
        self._limit = limit
        self._watches: dict[Hashable, Watch] = {}
        self._keys: dict[int, dict[Hashable, Mask]] = {}
        self.refused = 0
        """How many were not watched because a limit was reached, ours or the kernel's."""

    def __len__(self) -> int:
        """Return how many keys watch something."""
        return len(self._watches)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._watches

    def close(self) -> None:
        """Remove every watch."""
        self._inotify.close()
        self._watches.clear()
        self._keys.clear()

    def add(self, key: Hashable, path: str, mask: Mask) -> bool:
        """Watch a path under a key, instead of its former path; return whether it is watched."""
        if key not in self._watches and len(self._watches) >= self._limit:
            self._refuse(f"more than {self._limit} watches")
            return False
        try:
            watch = self._inotify.add_watch(path, mask | Mask.MASK_ADD)
        except OSError as error:
            self.discard(key)
            if error.errno in {errno.ENOSPC, errno.ENOMEM}:  # fs.inotify.max_user_watches
                self._refuse(f"{path}: {error.strerror}")
            return False
        if self._watches.get(key) is not watch:
            self.discard(key)
        self._watches[key] = watch
        self._keys.setdefault(watch.wd, {})[key] = mask
        return True

    def discard(self, key: Hashable) -> None:
        """Watch nothing under this key any more."""
        watch = self._watches.pop(key, None)
        if watch is None:
            return
        keys = self._keys[watch.wd]
        del keys[key]
        if not keys:
            del self._keys[watch.wd]
            with contextlib.suppress(OSError):  # it ended by itself; the event is still queued
                self._inotify.rm_watch(watch)

    async def next(self) -> list[KeyEvent] | None:
        """Wait for events and return a batch of them; None when the kernel lost some.

        The event loop gets a turn between two batches, also while more are queued.
        """
        await asyncio.sleep(0)
        events = [await self._inotify.get()]
        while len(events) < BATCH and (more := self._inotify.sync_get()) is not None:
            events.append(more)
        if any(event.mask & Mask.Q_OVERFLOW for event in events):
            return None
        return [one for event in events for one in self._by_key(event)]

    def _by_key(self, event: Event) -> list[KeyEvent]:
        """Return an event for each key that asked for it."""
        watch = event.watch
        keys = self._keys.get(watch.wd, {}) if watch is not None else {}
        name = "" if event.name is None else str(event.name)
        asked = [key for key, mask in keys.items() if event.mask & (mask | LOST)]
        if watch is not None and event.mask & Mask.IGNORED:
            for key in self._keys.pop(watch.wd, {}):
                del self._watches[key]
        return [KeyEvent(key, name, event.mask) for key in asked]

    def _refuse(self, why: str) -> None:
        if not self.refused:
            log.warning("cannot watch all files (%s); audits check the rest", why)
        self.refused += 1


class Folder:
    """Watches one folder by its name; while it does not exist, its nearest ancestor.

    It is a key of its Watches itself. Symlinks in its path are the administrator's and followed.
    """

    def __init__(self, watches: Watches, path: str, mask: Mask) -> None:
        self.path = path
        self._watches = watches
        self._mask = mask
        self._missing = ""
        self._inode: tuple[int, int] | None = None

    @property
    def exists(self) -> bool:
        """Whether the folder itself is watched."""
        return self._inode is not None

    @property
    def current(self) -> bool:
        """Whether the folder under this path is still the watched one."""
        return self._inode == self._inode_now()

    def arm(self) -> None:
        """Watch the folder, or its nearest ancestor."""
        for _ in range(_MAX_STEPS):
            place = self._nearest()
            self._inode = self._inode_now() if place == self.path else None
            if place == self.path or not self._is_folder(os.path.join(place, self._missing)):
                return

    def moved(self, event: KeyEvent) -> bool:
        """Return whether the folder itself came, went or moved: then it must be armed again."""
        return event.lost or (not self.exists and event.name == self._missing)

    def _nearest(self) -> str:
        """Watch the folder or its nearest ancestor, and return which."""
        place, self._missing = self.path, ""
        mask = self._mask | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
        while not self._watches.add(self, place, mask) and place != "/":
            place, self._missing = os.path.split(place)
            mask = _ANCESTOR
        return place

    def _inode_now(self) -> tuple[int, int] | None:
        try:
            status = self._watches.calls.stat(self.path)
        except OSError:
            return None
        return status.device, status.inode

    def _is_folder(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(self._watches.calls.stat(path).mode)
        except OSError:
            return False
