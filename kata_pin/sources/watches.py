"""A bounded set of inotify watches, each under a key of the caller's, and folders that come and go.

One inode may be watched under several keys (an ancestor of two folders): each key hears what it
asked for. A key whose folder is gone is told so, and then watches nothing. Files of cgroups are
different: inotify says nothing when they vanish (measured on Linux 6.18), so their owner discards.

Lifetime: until `close`; what was added is gone then. Out of scope: what an event means.
Facts: inotify(7).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from asyncinotify import Event, Inotify, Mask, Watch

log = logging.getLogger(__name__)

MAX_WATCHES: Final = 16384
"""Most watches of one set: some six for each sandbox of a full node, and as many again."""

BATCH: Final = 128
"""Most events that are returned at once; the event loop has its turn between two batches."""

CACHED: Final = 64
"""Events with the longest of names that one read takes."""

LOST: Final = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT | Mask.IGNORED
"""What ends a watch, or the name that it was known by."""

ARRIVED: Final = Mask.CREATE | Mask.MOVED_TO

_ANCESTOR: Final = ARRIVED | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
_MAX_STEPS: Final = 64  # folders of a path that may appear while it is being watched


@dataclass(frozen=True, slots=True)
class Happening:
    """Something happened to what a key watches; `name` is the entry of a folder, else empty."""

    key: Hashable
    name: str
    mask: Mask

    @property
    def lost(self) -> bool:
        """Whether what was watched is no longer there under its name."""
        return bool(self.mask & LOST)


class Watches:
    """The set; raises OSError when the kernel gives no inotify instance."""

    def __init__(self, limit: int = MAX_WATCHES) -> None:
        self._inotify = Inotify(cache_size=CACHED, sync_timeout=0)
        self._limit = limit
        self._watches: dict[Hashable, Watch] = {}
        self._keys: dict[int, dict[Hashable, Mask]] = {}
        self.refused = 0
        """How many were not watched for want of room, here or in the kernel."""

    def __len__(self) -> int:
        """Return how many keys watch something."""
        return len(self._watches)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._watches

    def close(self) -> None:
        """Give every watch back."""
        self._inotify.close()
        self._watches.clear()
        self._keys.clear()

    def add(self, key: Hashable, path: str, mask: Mask) -> bool:
        """Watch a path under a key, instead of what it watched; return whether it is watched."""
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
            with contextlib.suppress(OSError):  # it ended by itself; the event is on its way
                self._inotify.rm_watch(watch)

    async def next(self) -> list[Happening] | None:
        """Wait until something happens and return all of it; None when the kernel lost some.

        The event loop has a turn between two batches, also while more are queued.
        """
        await asyncio.sleep(0)
        events = [await self._inotify.get()]
        while len(events) < BATCH and (more := self._inotify.sync_get()) is not None:
            events.append(more)
        if any(event.mask & Mask.Q_OVERFLOW for event in events):
            return None
        return [one for event in events for one in self._happenings(event)]

    def _happenings(self, event: Event) -> list[Happening]:
        """Return what an event is to each key that asked for it."""
        watch = event.watch
        keys = self._keys.get(watch.wd, {}) if watch is not None else {}
        name = "" if event.name is None else str(event.name)
        heard = [key for key, mask in keys.items() if event.mask & (mask | LOST)]
        if watch is not None and event.mask & Mask.IGNORED:
            for key in self._keys.pop(watch.wd, {}):
                del self._watches[key]
        return [Happening(key, name, event.mask) for key in heard]

    def _refuse(self, why: str) -> None:
        if not self.refused:
            log.warning("not everything is watched, audits look at the rest: %s", why)
        self.refused += 1


class Folder:
    """One folder by its name, there or not: else its nearest ancestor is watched for it.

    It is a key of its Watches itself. Symlinks in its path are the administrator's and followed.
    """

    def __init__(self, watches: Watches, path: str, mask: Mask) -> None:
        self.path = path
        self._watches = watches
        self._mask = mask
        self._missing = ""
        self._identity: tuple[int, int] | None = None

    @property
    def there(self) -> bool:
        """Whether the folder itself is watched."""
        return self._identity is not None

    @property
    def current(self) -> bool:
        """Whether what is watched is what the path names now: an ancestor may be another one."""
        return self._identity == _identity(self.path)

    def arm(self) -> None:
        """Watch the folder, or for it."""
        for _ in range(_MAX_STEPS):
            place = self._nearest()
            self._identity = _identity(self.path) if place == self.path else None
            if place == self.path or not os.path.isdir(os.path.join(place, self._missing)):
                return

    def moved(self, happening: Happening) -> bool:
        """Whether this is about where the folder is, and not about what is in it: arm it again."""
        if happening.lost:
            return True
        return not self.there and happening.name == self._missing

    def _nearest(self) -> str:
        """Watch the folder or its nearest ancestor, and return which."""
        place, self._missing = self.path, ""
        mask = self._mask | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
        while not self._watches.add(self, place, mask) and place != "/":
            place, self._missing = os.path.split(place)
            mask = _ANCESTOR
        return place


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
