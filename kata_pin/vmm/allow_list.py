"""Which executables may be a VMM, and of which kind (D5).

/proc/<pid>/exe is the kernel's word, but a path in the process's own mount namespace: a container
can have its own /usr/bin/qemu-system-x86_64. So where the host has a file of that path, it must be
the same file. A binary that was replaced on disk since reads as deleted and cannot be compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

from kata_pin.vmm.checks import Refused
from kata_pin.vmm.host_access import HostPaths
from kata_pin.vmm.kinds import BUILTIN, VmmKind, kind_of, kinds_for

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


class Allowlist:
    """Executable paths whose last part may be a pattern; built once from settings."""

    def __init__(self, root: HostPaths, executables: Iterable[str]) -> None:
        self._root = root
        paths = tuple(executables)
        self._patterns = [os.path.split(path) for path in paths]
        self.kinds = kinds_for(paths)

    def kind_of(self, path: str) -> VmmKind | None:
        """Return which VMM the path is, None when it is not on the list."""
        folder, name = os.path.split(path)
        if not any(folder == where and fnmatchcase(name, what) for where, what in self._patterns):
            return None
        return kind_of(path, self.kinds)

    def check(self, pid: int, path: str, *, deleted: bool) -> VmmKind:
        """Return which VMM the process runs; raise Refused when it is not a listed executable."""
        kind = self.kind_of(path)
        if kind is None:
            raise Refused(
                f"its executable {path or '(none)'} is not on the allow-list (`hypervisors`)"
            )
        if self._root.live and not deleted and not self._is_host_file(pid, path):
            raise Refused(f"its executable is not the host's file {path}")
        return kind

    def _is_host_file(self, pid: int, path: str) -> bool:
        """Whether the host has no such file to compare with, or the very same one."""
        try:
            ours = os.stat(self._root.path(path))
        except OSError:
            return True
        try:
            theirs = os.stat(self._root.proc(pid, "exe"))
        except OSError as error:
            raise Refused(
                f"cannot compare its executable with the host's: {error.strerror}"
            ) from error
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
