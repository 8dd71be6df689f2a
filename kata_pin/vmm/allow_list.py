"""Which executables may be a VMM or a shim, and of which kind (D5, D24).

/proc/<pid>/exe is the kernel's word, but a path in the process's own mount namespace: a container
can have its own /usr/bin/qemu-system-x86_64. So the file has to be the very one that the host has
at that path. One that was removed or replaced since cannot be compared; it has to be root's, and on
a file system of the host.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

from kata_pin.vmm.checks import Refused
from kata_pin.vmm.host_access import HostPaths
from kata_pin.vmm.kinds import BUILTIN, VmmKind, kind_of, kinds_for
from kata_pin.wire.proc import ExeFile

_DIRECTORIES: Final = (
    "/usr/bin",
    "/usr/local/bin",
    "/usr/libexec",
    "/opt/kata/bin",
    "/opt/kata/runtime-rs/bin",
)

DEFAULT_EXECUTABLES: Final = tuple(
    f"{folder}/{name}" for folder in _DIRECTORIES for kind in BUILTIN for name in kind.executables
)
"""Where distributions and Kata's own packages put hypervisors (kata-deploy: /opt/kata)."""

DEFAULT_SHIMS: Final = tuple(f"{folder}/containerd-shim-kata*" for folder in _DIRECTORIES)
"""Where they put the shim; kata-deploy's links in /usr/local/bin lead to /opt/kata."""

_COMM_LENGTH: Final = 15
_MAX_MOUNTINFO: Final = 4 * 1024 * 1024


class Allowlist:
    """Executable paths whose last part may be a pattern; built once from settings.

    `setting` names the one that adds to them.
    """

    def __init__(
        self, root: HostPaths, executables: Iterable[str], *, setting: str = "hypervisors"
    ) -> None:
        self._root = root
        self._paths = tuple(executables)
        self._patterns = [os.path.split(path) for path in self._paths]
        self._setting = setting
        names = (name for _, name in self._patterns)
        self._starts = tuple({re.split(r"[*?[]", name)[0][:_COMM_LENGTH] for name in names})

    def holds(self, path: str) -> bool:
        """Return whether a path is on the list."""
        folder, name = os.path.split(path)
        return any(folder == where and fnmatchcase(name, what) for where, what in self._patterns)

    def may_run_in(self, comm: str) -> bool:
        """Whether a process with this name may run one: exec names it after the file's first bytes.

        (TASK_COMM_LEN - 1 of them: begin_new_exec in fs/exec.c.)
        """
        return comm.startswith(self._starts)

    def check(self, exe: ExeFile) -> None:
        """Raise Refused unless a process with this file runs a listed executable of the host."""
        if not self.holds(exe.path):
            path = exe.path or "(none)"
            raise Refused(f"its executable {path} is not on the allow-list (`{self._setting}`)")
        if not self._root.live:
            return
        self.check_owner(exe)
        if exe.deleted:
            if exe.device not in self._devices(exe.path):
                raise Refused(
                    f"its executable {exe.path} was deleted, and is on no file system of the host"
                )
        elif not self._is_host_file(exe):
            raise Refused(f"its executable is not the host's file {exe.path}")

    def check_owner(self, exe: ExeFile) -> None:
        """Raise Refused unless the file is root's, and nobody else can write it."""
        if exe.uid:
            raise Refused(f"its executable {exe.path} belongs to uid {exe.uid}, not to root")
        if exe.mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Refused(f"its executable {exe.path} can be written by others than root")

    def _is_host_file(self, exe: ExeFile) -> bool:
        try:
            ours = self._root.calls.stat(self._root.path(exe.path))
        except OSError:
            return False
        return (ours.device, ours.inode) == (exe.device, exe.inode)

    def _devices(self, path: str) -> set[int]:
        """Return the devices of the host's mounts, and of the folder that had the executable.

        With btrfs and overlayfs a file's device is not that of its mount.
        """
        found: set[int] = set()
        for place in (path, os.path.dirname(path)):
            try:
                found.add(self._root.calls.stat(self._root.path(place)).device)
            except OSError:
                continue
        try:
            with open(self._root.proc("self", "mountinfo"), "rb", buffering=0) as file:
                lines = file.read(_MAX_MOUNTINFO).split(b"\n")
        except OSError:
            return found
        for line in lines:
            major, colon, minor = (line.split(b" ", 3) + [b""] * 3)[2].partition(b":")
            if colon and major.isdigit() and minor.isdigit():
                found.add(os.makedev(int(major), int(minor)))
        return found


class VmmAllowlist(Allowlist):
    """The executables of VMMs, and which kind each one is."""

    def __init__(self, root: HostPaths, executables: Iterable[str]) -> None:
        super().__init__(root, executables)
        self.kinds = kinds_for(self._paths)

    def kind_of(self, path: str) -> VmmKind | None:
        """Return which VMM the path is, None when it is neither on the list nor a jail's."""
        return kind_of(path, self.kinds) if self.holds(path) or self.may_be_jailed(path) else None

    def may_be_jailed(self, path: str) -> bool:
        """Whether a path may be a listed program's in a jail: it lies in the root folder there."""
        folder, name = os.path.split(path)
        if folder != "/" or self.holds(path):
            return False
        listed = any(fnmatchcase(name, what) for _, what in self._patterns)
        return listed and kind_of(path, self.kinds).jailed

    @property
    def jailed_names(self) -> frozenset[str]:
        """The names of the programs that Kata may run in a jail, patterns without their `*`."""
        names = {name.rstrip("*") for _, name in self._patterns}
        return frozenset(name for name in names if kind_of(name, self.kinds).jailed)
