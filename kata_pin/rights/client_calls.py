"""Calls of the broker about files, folders, sockets and threads: paths become rows and ids."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from errno import EACCES
from functools import partial
from typing import Final, TypeVar

from kata_pin.rights.broker.files import File
from kata_pin.rights.broker.protocol import (
    MAX_CHANGES,
    MAX_MESSAGE,
    NUMBER,
    REQUEST,
    STATUS,
    AffinityChange,
    Changed,
    FileStatus,
    Settings,
    parse_changed,
    render_changes,
)
from kata_pin.rights.broker.rows import (
    AGENT_ROW,
    FILE_ROW,
    FOLDERS_ROW,
    NAMES_ROW,
    SERVER_ROW,
    WATCH_ROW,
    Finder,
    Found,
    Value,
    names_of,
)
from kata_pin.rights.calls import DIRECT

# Calls of the broker about files, folders and sockets: their paths become rows and ids here.
#
# What needs no rights is not asked of the broker.

T = TypeVar("T")


class FileCalls(ABC):
    """The calls; see Calls for what each does."""

    def __init__(self, settings: Settings) -> None:
        self._finder = Finder(settings)

    @abstractmethod
    def _ask(
        self, name: str, values: Mapping[str, Value], descriptors: Sequence[int] = ()
    ) -> bytes:
        """Return the broker's answer to a request; raises OSError."""

    @abstractmethod
    def _handed(self, name: str, values: Mapping[str, Value]) -> int:
        """Return the descriptor that the broker hands over; raises OSError."""

    def listdir(self, path: str) -> list[str]:
        """See Calls."""
        return self._own_or(partial(os.listdir, path), partial(self._names, NAMES_ROW, path))

    def folders(self, path: str) -> list[str]:
        """See Calls."""
        return self._own_or(partial(DIRECT.folders, path), partial(self._names, FOLDERS_ROW, path))

    def stat(self, path: str) -> FileStatus:
        """See Calls."""
        return self._own_or(partial(DIRECT.stat, path), partial(self._stat, path))

    def file(self, base: str, parts: Sequence[str], limit: int) -> File:
        """See Calls."""
        path = "/".join((base.rstrip("/"), *parts))
        return self._own_or(
            partial(DIRECT.file, base, parts, limit), lambda: self._file(path, limit)
        )

    def add_watch(self, inotify: int, path: str, mask: int) -> int:
        """See Calls."""
        return self._own_or(
            partial(DIRECT.add_watch, inotify, path, mask),
            lambda: self._add_watch(inotify, path, mask & 0xFFFF_FFFF),
        )

    def connect(self, path: str) -> socket.socket:
        """See Calls."""
        for kind in (AGENT_ROW, SERVER_ROW):
            found = self._finder.find(kind, path)
            if found is not None:
                return socket.socket(fileno=self._handed(found.row.name, found.values))
        raise PermissionError(EACCES, "not a socket that the broker connects to", path)

    def _own_or(self, own: Callable[[], T], brokered: Callable[[], T]) -> T:
        try:
            return own()
        except PermissionError:
            return brokered()

    def _found(self, kind: str, path: str) -> Found:
        found = self._finder.find(kind, path)
        if found is None:
            raise PermissionError(EACCES, os.strerror(EACCES), path)
        return found

    def _names(self, kind: str, path: str) -> list[str]:
        found = self._found(kind, path)
        return names_of(self._ask(found.row.name, found.values))

    def _file(self, path: str, limit: int) -> File:
        found = self._found(FILE_ROW, path)
        answer = self._ask(found.row.name, {**found.values, "limit": limit})
        return File(FileStatus(*STATUS.unpack_from(answer)), answer[STATUS.size :])

    def _stat(self, path: str) -> FileStatus:
        place, program = self._finder.find_place(path), self._finder.find_program(path)
        if place is not None:
            answer = self._ask("folder-status", place)
        elif program is not None:
            answer = self._ask("program", program)
        else:
            return self._file(path, 0).status
        return FileStatus(*STATUS.unpack(answer))

    def _add_watch(self, inotify: int, path: str, mask: int) -> int:
        place = self._finder.find_place(path)
        if place is not None:
            answer = self._ask("watch-folder", {**place, "mask": mask}, [inotify])
        else:
            found = self._found(WATCH_ROW, path)
            answer = self._ask(found.row.name, {**found.values, "mask": mask}, [inotify])
        (number,) = NUMBER.unpack(answer)
        return int(number)


# Calls of the broker that change many threads at once: affinities, groups, scheduling classes.

MAX_HEAD: Final = 512  # what a row has before its changes

NO_CPUS: frozenset[int] = frozenset()


class ThreadCalls(ABC):
    """The calls, by requests that are short enough; see Calls for what each does."""

    @abstractmethod
    def _ask(
        self, name: str, values: Mapping[str, Value], descriptors: Sequence[int] = ()
    ) -> bytes:
        """Return the broker's answer to a request; raises OSError."""

    def set_affinities(self, changes: Sequence[AffinityChange], proc: str) -> list[Changed]:
        """See Calls."""
        assert proc == "/proc", "the broker knows the running system only"
        done: list[Changed] = []
        for request in _requests(changes):
            done += parse_changed(self._ask("affinities", {"changes": request}))
        return done

    def set_classes(
        self, changes: Sequence[AffinityChange], policy: int, priority: int, proc: str
    ) -> list[Changed]:
        """See Calls."""
        assert proc == "/proc", "the broker knows the running system only"
        head = {"policy": policy, "priority": priority}
        done: list[Changed] = []
        for request in _requests([one._replace(cpus=NO_CPUS) for one in changes]):
            done += parse_changed(self._ask("classes", {**head, "changes": request}))
        return done

    def make_group(self, class_name: str, name: str) -> None:
        """See Calls."""
        self._ask("make-group", {"class": class_name, "group": name})

    def join_group(
        self, class_name: str, name: str, threads: Sequence[AffinityChange]
    ) -> list[Changed]:
        """See Calls."""
        done: list[Changed] = []
        for request in _requests([one._replace(cpus=NO_CPUS) for one in threads]):
            values: dict[str, Value] = {"class": class_name, "group": name, "changes": request}
            done += parse_changed(self._ask("join-group", values))
        return done

    def remove_group(self, class_name: str, name: str) -> None:
        """See Calls."""
        self._ask("remove-group", {"class": class_name, "group": name})


def _requests(changes: Sequence[AffinityChange]) -> Iterator[bytes]:
    """Yield requests for changes that are short enough."""
    request = render_changes(changes) if len(changes) <= MAX_CHANGES else b""
    if changes and (not request or len(request) > MAX_MESSAGE - REQUEST.size - MAX_HEAD):
        half = (len(changes) + 1) // 2
        yield from _requests(changes[:half])
        yield from _requests(changes[half:])
    elif changes:
        yield request
