"""The cgroups of a sandbox: kata_<id> with a cpuset, /kata_overhead/<id> without one.

With runtime-rs the first is <id>, and all is in it. Version 2: the whole QEMU process is in
kata_<id>. Version 1: only the vCPU threads are, one by one, in the cpu and cpuset trees. With
sandbox_cgroup_only all is in kata_<id>. As Kata 3.21 with the cgroupfs driver does, empty folders
are left behind; every one is noted in ROOT/cgroups, for purge.
Out of scope: the systemd driver; a cgroupsPath `slice:prefix:name` is used as a folder's name, as
Kata was seen to do with cgroupfs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Final

from tests.e2e.minikata.ledger import Ledger

MOUNT: Final = "/sys/fs/cgroup"
_V1: Final = ("cpuset", "cpu")


def unified() -> bool:
    """Whether this machine has cgroup version 2 only."""
    return os.path.exists(f"{MOUNT}/cgroup.controllers")


def sandbox_path(cgroups_path: str, sandbox: str, prefix: str) -> str:
    """Return the sandbox's cgroup for the cgroupsPath of its config.json.

    The Go runtime has the prefix `kata_`, runtime-rs none.
    """
    if ":" in cgroups_path:
        return f"/{cgroups_path.strip('/')}"
    parent, _, name = (cgroups_path or f"/vc/{sandbox}").rstrip("/").rpartition("/")
    return f"{parent if parent.startswith('/') or not parent else '/' + parent}/{prefix}{name}"


class Cgroup:
    """One cgroup, in every tree where Kata needs it."""

    def __init__(self, path: str, *, cpuset: bool, ledger: Ledger) -> None:
        """Make it. Version 2: the cpuset controller is turned on above it only if `cpuset`."""
        self.path = path
        self._folders = [MOUNT + path] if unified() else [f"{MOUNT}/{tree}{path}" for tree in _V1]
        for folder in self._folders:
            self._make(folder, ledger)
        if unified() and cpuset:
            self._enable_cpuset()

    def add_process(self, pid: int) -> None:
        """Move a whole process in."""
        for folder in self._folders:
            _write(f"{folder}/cgroup.procs", str(pid))

    def add_threads(self, pid: int, tids: Iterable[int]) -> None:
        """Move vCPU threads in; with version 2 the kernel moves the whole process."""
        if unified():
            self.add_process(pid)
            return
        for tid in tids:
            for folder in self._folders:
                _write(f"{folder}/tasks", str(tid))

    def set_cpuset(self, cpus: str, mems: str) -> None:
        """Write the cpuset, also when it is the same: Linux before 6.2 wipes pins then."""
        folder = self._folders[0]
        for name, value in (("cpuset.cpus", cpus), ("cpuset.mems", mems)):
            if value:
                _write(f"{folder}/{name}", value)

    def _make(self, folder: str, ledger: Ledger) -> None:
        tree = MOUNT if unified() else f"{MOUNT}/{folder[len(MOUNT) + 1 :].partition('/')[0]}"
        made = tree
        for part in folder[len(tree) + 1 :].split("/"):
            made += f"/{part}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(made, 0o755)
                ledger.note_cgroup(made)
            if tree.endswith("/cpuset"):
                self._inherit(made)

    @staticmethod
    def _inherit(folder: str) -> None:
        """Give a version 1 cpuset its parent's values while it has none, as containerd does."""
        for name in ("cpuset.cpus", "cpuset.mems"):
            with open(f"{folder}/{name}", encoding="utf-8") as file:
                if file.read().strip():
                    continue
            with open(f"{os.path.dirname(folder)}/{name}", encoding="utf-8") as file:
                value = file.read().strip()
            _write(f"{folder}/{name}", value)

    def _enable_cpuset(self) -> None:
        above = MOUNT
        for part in self.path.strip("/").split("/"):
            _write(f"{above}/cgroup.subtree_control", "+cpuset")
            above += f"/{part}"


def _write(path: str, value: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(value)
