"""The messages that hooks had to leave as files because the daemon did not record them in time.

A file holds exactly the bytes of a request (wire/hook_message.py) and appears by rename, so it is
whole or not there. The daemon takes the spool in at start, whenever `watch` says so, and in each
audit; a message is removed with `done` after its commit, so a crash in between only repeats it.
What can not be read is set aside in `bad`, where a bounded number is kept for a human.

A Spool holds no open file between calls. Out of scope: what a message means, and whether it was
recorded already (kata_pin.daemon: identity is its stamp and pid).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from asyncinotify import Inotify, Mask

from kata_pin.errors import RemoteProtocolError
from kata_pin.owned_file import FileRefused, read_owned
from kata_pin.wire import hook_message
from kata_pin.wire.hook_message import HookMessage

log = logging.getLogger(__name__)

MAX_FILE_BYTES = hook_message.MAX_HEADER + hook_message.MAX_BODY
MAX_BAD = 16
STALE_S = 60.0  # a hook writes its file in milliseconds; older than this, it was killed meanwhile
RETRY_S = 1.0  # between tries to watch a folder that can not be watched

_WATCHED = Mask.MOVED_TO | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
_LOST = Mask.IGNORED | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """One spooled message and the name of its file."""

    name: str
    message: HookMessage


class Spool:
    """The folder of spooled messages; `max_bad` bounds how many unreadable ones are kept."""

    def __init__(self, directory: str, *, max_bad: int = MAX_BAD) -> None:
        self._directory = directory
        self._bad = os.path.join(directory, "bad")
        self._max_bad = max_bad
        self._owners = frozenset({0, os.geteuid()})
        self.set_aside = 0
        """How many files were unreadable since the start."""

    def prepare(self) -> None:
        """Create the folder, for root alone, where tmpfiles.d has not. Raises OSError."""
        os.makedirs(self._directory, mode=0o700, exist_ok=True)

    def pending(self) -> Iterator[SpoolEntry]:
        """Yield the messages in the order of their stamps, reading each only when its turn comes.

        Takes a message that appears meanwhile the next time. An absent folder holds none. What is
        no message, or an unreadable one, is set aside.
        """
        names, others = self._list()
        for name in others:
            self._sweep(name)
        for name in names:
            try:
                message = self._message(name)
            except (FileRefused, RemoteProtocolError) as error:
                self._put_aside(name, error)
            else:
                if message is not None:
                    yield SpoolEntry(name, message)

    def peek(self) -> Iterator[SpoolEntry]:
        """Yield the same messages, and leave every file as it is: for who only looks."""
        for name in self._list()[0]:
            with contextlib.suppress(FileRefused, RemoteProtocolError):
                message = self._message(name)
                if message is not None:
                    yield SpoolEntry(name, message)

    def done(self, entry: SpoolEntry) -> None:
        """Remove a message that is recorded; one that is gone already is no error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(entry.name))

    def reject(self, entry: SpoolEntry, reason: object) -> None:
        """Set aside a message that can never be taken: its content is beyond repair."""
        self._put_aside(entry.name, reason)

    async def watch(self) -> AsyncGenerator[None, None]:
        """Yield whenever it is time for `pending`: at once, then after each arrival.

        Arrivals that come together may yield once. An overflow of the kernel's queue, or a folder
        that was replaced, yields too: what was missed is found by looking.
        """
        while True:
            try:
                with Inotify() as inotify:
                    self.prepare()
                    inotify.add_watch(self._directory, _WATCHED)
                    yield None
                    async for _ in _arrivals(inotify):
                        yield None
            except OSError as error:
                log.warning("can not watch %s: %s", self._directory, error.strerror)
                await asyncio.sleep(RETRY_S)

    def _list(self) -> tuple[list[str], list[str]]:
        """Return the names of messages by stamp, and those of everything else."""
        messages, others = [], []
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._directory):
                key = hook_message.parse_spool_name(name)
                if key is not None:
                    messages.append((key, name))
                elif name != "bad":
                    others.append(name)
        return [name for _, name in sorted(messages)], others

    def _sweep(self, name: str) -> None:
        """Deal with a file that is not a message: unfinished, abandoned or foreign."""
        try:
            age_s = time.time() - os.lstat(self._path(name)).st_mtime
            if not name.endswith(".tmp"):
                self._put_aside(name, "not the name of a message")
            elif age_s > STALE_S:
                os.unlink(self._path(name))
        except OSError as error:
            log.debug("can not sweep %s: %s", name, error.strerror)

    def _message(self, name: str) -> HookMessage | None:
        """Return the message of a file; None if it is gone, or cannot be read for now.

        Raises FileRefused and RemoteProtocolError for what is no message of ours.
        """
        try:
            return _decode(name, read_owned(self._path(name), MAX_FILE_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:  # such as EMFILE: it stays for the next time
            log.warning("can not read spooled message %s: %s", name, error.strerror)
        return None

    def _put_aside(self, name: str, reason: object) -> None:
        self.set_aside += 1
        log.warning("spooled message %s set aside: %s", name, reason)
        try:
            os.makedirs(self._bad, mode=0o700, exist_ok=True)
            os.rename(self._path(name), os.path.join(self._bad, name))
            self._prune()
        except OSError as error:
            log.warning("can not set %s aside: %s", name, error.strerror)

    def _prune(self) -> None:
        """Keep the newest of what was set aside."""
        with os.scandir(self._bad) as entries:
            aged = sorted((e.stat(follow_symlinks=False).st_ctime_ns, e.path) for e in entries)
        for _, path in aged[: -self._max_bad]:
            os.unlink(path)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)


async def _arrivals(inotify: Inotify) -> AsyncGenerator[None, None]:
    """Yield for each event that may mean a new message, until the watch is lost."""
    async for event in inotify:
        if event.mask & _LOST:
            return
        yield None


def _decode(name: str, content: bytes) -> HookMessage:
    message = hook_message.decode(content)
    if message.spool_name != name:
        raise RemoteProtocolError(f"holds the message of {message.spool_name}")
    if message.stamp_ns > time.clock_gettime_ns(time.CLOCK_BOOTTIME):
        raise RemoteProtocolError("stamped in the future: left from before a reboot")
    return message
