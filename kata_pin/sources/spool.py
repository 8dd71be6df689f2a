"""The spool: messages that hooks left as files because the daemon did not record them in time.

A file holds exactly the bytes of a request (wire/hook_message.py) and appears by rename, so it is
complete or absent. The daemon reads the spool at start, whenever `watch` yields, and in each audit;
`done` removes a message after its commit, so a crash in between only repeats it. Unreadable files
are moved to `bad`, where the newest are kept for an administrator.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Iterator

from asyncinotify import Mask

from kata_pin.errors import RemoteProtocolError
from kata_pin.owned_file import FileRefused, read_owned
from kata_pin.sources.watches import folder_events
from kata_pin.wire import hook_message
from kata_pin.wire.hook_message import UNINSTALLED, HookMessage

log = logging.getLogger(__name__)

MAX_FILE_BYTES = hook_message.MAX_HEADER + hook_message.MAX_BODY
MAX_BAD = 16
STALE_S = 60.0  # a hook writes its file in milliseconds; if older, the hook was killed meanwhile
RETRY_S = 1.0  # between tries to watch a folder that cannot be watched


class Spool:
    """The folder of spooled messages; `max_bad` bounds how many unreadable ones are kept."""

    def __init__(self, directory: str, *, max_bad: int = MAX_BAD) -> None:
        self._directory = directory
        self._bad = os.path.join(directory, "bad")
        self._max_bad = max_bad

    def prepare(self) -> None:
        """Create the folder, for its owner alone, where tmpfiles.d has not. Raises OSError.

        Its messages, which root's hooks write, get its group, so that the daemon can read them.
        """
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(UNINSTALLED))

    def retire(self) -> None:
        """Tell hooks that are still configured not to spool, until a daemon runs again."""
        with contextlib.suppress(OSError):  # without the folder they cannot
            descriptor = os.open(self._path(UNINSTALLED), os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.close(descriptor)

    def pending(self) -> Iterator[HookMessage]:
        """Yield the messages in the order of their stamps, reading each when its turn comes.

        Messages that appear meanwhile are left for the next call. Anything else is set aside.
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
                    yield message

    def peek(self) -> Iterator[HookMessage]:
        """Yield the same messages without changing any file, for `show` and `check`."""
        for name in self._list()[0]:
            with contextlib.suppress(FileRefused, RemoteProtocolError):
                message = self._message(name)
                if message is not None:
                    yield message

    def done(self, message: HookMessage) -> None:
        """Remove a message that is recorded."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(message.spool_name))

    def reject(self, message: HookMessage, reason: object) -> None:
        """Set aside a message whose content is invalid."""
        self._put_aside(message.spool_name, reason)

    async def watch(self) -> AsyncGenerator[None, None]:
        """Yield whenever `pending` may have messages: once watching, then after each arrival."""
        events = folder_events(
            self._directory,
            Mask.MOVED_TO,
            retry_s=RETRY_S,
            level=logging.WARNING,
            prepare=self.prepare,
        )
        async with contextlib.aclosing(events):
            async for _ in events:
                yield None

    def _list(self) -> tuple[list[str], list[str]]:
        """Return the names of messages by stamp, and those of everything else."""
        messages, others = [], []
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._directory):
                key = hook_message.parse_spool_name(name)
                if key is not None:
                    messages.append((key, name))
                elif name not in {"bad", UNINSTALLED}:
                    others.append(name)
        return [name for _, name in sorted(messages)], others

    def _sweep(self, name: str) -> None:
        """Handle a file that is not a message: unfinished, abandoned or foreign."""
        try:
            age_s = time.time() - os.lstat(self._path(name)).st_mtime
            if not name.endswith(".tmp"):
                self._put_aside(name, "not the name of a message")
            elif age_s > STALE_S:
                os.unlink(self._path(name))
        except OSError as error:
            log.debug("spool: cannot clean up %s: %s", name, error.strerror)

    def _message(self, name: str) -> HookMessage | None:
        """Return the message of a file; None if it is gone, or cannot be read for now.

        Raises FileRefused or RemoteProtocolError for a file that is not a message of ours.
        """
        try:
            return _decode(name, read_owned(self._path(name), MAX_FILE_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:  # such as EMFILE: it stays for the next time
            log.warning("cannot read spooled message %s: %s; retrying", name, error.strerror)
        return None

    def _put_aside(self, name: str, reason: object) -> None:
        log.warning("spooled message %s is invalid, moved to %s: %s", name, self._bad, reason)
        try:
            os.makedirs(self._bad, mode=0o700, exist_ok=True)
            self._move(name)
            self._prune()
        except OSError as error:
            log.warning("cannot move spooled message %s: %s", name, error.strerror)

    def _move(self, name: str) -> None:
        """Move a file to `bad`; a folder that only its owner can move is removed, if empty."""
        try:
            os.rename(self._path(name), os.path.join(self._bad, name))
        except PermissionError as refused:
            try:
                os.rmdir(self._path(name))
            except OSError:
                raise refused from None
            log.warning("%s is an empty folder of another user: removed instead", name)

    def _prune(self) -> None:
        """Keep the newest of what was set aside."""
        with os.scandir(self._bad) as entries:
            aged = sorted((e.stat(follow_symlinks=False).st_ctime_ns, e.path) for e in entries)
        for _, path in aged[: -self._max_bad]:
            os.unlink(path)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)


def _decode(name: str, content: bytes) -> HookMessage:
    message = hook_message.decode(content)
    if message.spool_name != name:
        raise RemoteProtocolError(f"holds the message of {message.spool_name}")
    if message.stamp_ns > time.clock_gettime_ns(time.CLOCK_BOOTTIME):
        raise RemoteProtocolError("its stamp is in the future: it is from before a reboot")
    return message
