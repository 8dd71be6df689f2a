"""Groups of resctrl: one per sandbox, to count what its threads use, in one per class.

Only groups of our own prefix below /sys/fs/resctrl are made, joined or removed, and a class is one
that the first message names with its schemata. Facts: Documentation/filesystems/resctrl.rst. A
thread can join a monitoring group only from its control group; a thread is taken only from root, or
from the thread's owner (rdtgroup_task_write_permission).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from errno import EACCES, EINVAL
from typing import Final, Protocol

from kata_pin.broker.affinity import change_threads
from kata_pin.broker.protocol import Change, Changed

ROOT: Final = "/sys/fs/resctrl"
PREFIX: Final = "kata-pin-"

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\Z")
_MONITORING: Final = "mon_groups"


class Files(Protocol):
    """The three things that are done to resctrl's files; each raises OSError."""

    def mkdir(self, path: str) -> None:
        """Make a group."""

    def rmdir(self, path: str) -> None:
        """Remove a group; its threads go back to the one around it."""

    def write(self, path: str, text: str) -> None:
        """Write in one call."""


class KernelFiles:
    """The kernel's own."""

    def mkdir(self, path: str) -> None:
        """See Files."""
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        """See Files."""
        os.rmdir(path)

    def write(self, path: str, text: str) -> None:
        """See Files."""
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


class Resctrl:
    """Makes, fills and removes groups; `classes` has the schemata of each by its name."""

    def __init__(
        self,
        classes: Mapping[str, str],
        root: str = ROOT,
        files: Files | None = None,
        proc: str = "/proc",
    ) -> None:
        self._classes = classes
        self._root = root
        self._proc = proc
        self._files = files or KernelFiles()
        self._configured: set[str] = set()
        """Classes whose schemata were written by this process: others may be of older settings."""

    def make(self, class_name: str, name: str) -> None:
        """Make the group of a sandbox, and its class's first; one that is there is good too.

        OSError as the kernel has it: ENOSPC without a free monitor or class, EBUSY while monitors
        of removed groups still count down, EINVAL for schemata that it refuses.
        """
        if class_name and class_name not in self._configured:
            self._make_class(class_name)
        with suppress(FileExistsError):
            self._files.mkdir(self._group(class_name, name))

    def join(self, class_name: str, name: str, threads: Sequence[Change]) -> list[Changed]:
        """Have threads join a group, each identified as for affinities; one errno per thread."""
        group, control = self._group(class_name, name), self._control(class_name)

        def move(tid: int, _: object) -> None:
            try:
                self._files.write(f"{group}/tasks", f"{tid}\n")
            except OSError as error:
                if error.errno != EINVAL or not class_name:
                    raise  # somebody else's control group: it is left there
                self._files.write(f"{control}/tasks", f"{tid}\n")
                self._files.write(f"{group}/tasks", f"{tid}\n")

        return change_threads(threads, self._proc, move, lambda _: ())

    def remove(self, class_name: str, name: str) -> None:
        """Remove the group of a sandbox, or without `name` that of a class; OSError otherwise."""
        if not class_name and not name:
            raise OSError(EINVAL, "no group of ours")
        path = self._group(class_name, name) if name else self._control(class_name)
        with suppress(FileNotFoundError):
            self._files.rmdir(path)
        if not name:
            self._configured.discard(class_name)

    def _make_class(self, class_name: str) -> None:
        schemata = self._classes.get(class_name)
        if schemata is None:
            raise OSError(EACCES, "no class of the first message")
        control, is_new = self._control(class_name), True
        try:
            self._files.mkdir(control)
        except FileExistsError:
            is_new = False
        try:
            for line in schemata.split():
                self._files.write(f"{control}/schemata", f"{line}\n")
        except OSError:
            if is_new:
                self._files.rmdir(control)
            raise
        self._configured.add(class_name)

    def _control(self, class_name: str) -> str:
        return f"{self._root}/{PREFIX}{_checked(class_name)}" if class_name else self._root

    def _group(self, class_name: str, name: str) -> str:
        return f"{self._control(class_name)}/{_MONITORING}/{PREFIX}{_checked(name)}"


def _checked(name: str) -> str:
    if _NAME.match(name) is None:
        raise OSError(EINVAL, "not the name of a group")
    return name
