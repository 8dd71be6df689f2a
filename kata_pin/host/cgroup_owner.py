"""Whose a cgroup is: whether anybody but root could have moved a process into it (D24).

A process enters a cgroup if its mover may write the cgroup's cgroup.procs (v1: tasks) and, with
v2, that of the common ancestor. So every folder from the cgroup up to the root of its hierarchy has
to belong to root alone, and none may be marked as delegated: systemd sets trusted.delegate or
user.delegate on what it leaves to a unit (systemd.resource-control(5), Delegate=).
"""

from __future__ import annotations

import os
import posixpath
import stat
from typing import Final

from kata_pin.host.cgroup_mounts import cgroup_mounts
from kata_pin.host.root import HostRoot
from kata_pin.wire.proc import CgroupEntry

_MEMBERS: Final = ("cgroup.procs", "tasks", "cgroup.threads")
"""The files of a cgroup that move processes or threads into it; v1 and v2 have two of them each."""

_MARKS: Final = ("trusted.delegate", "user.delegate")


def why_not_roots(root: HostRoot, entry: CgroupEntry) -> str:
    """Return why somebody else may have put a process into a cgroup; empty where only root can.

    A captured tree has no cgroups to look at, and counts as root's.
    """
    if not root.live:
        return ""
    if entry.removed:
        return f"cgroup {entry.path} has been removed"
    controller = entry.controllers[0] if entry.controllers else ""
    for mount in cgroup_mounts(root, controller):
        folder = mount.folder(entry.path) if mount.v1 == bool(entry.controllers) else None
        if folder is not None:
            return _why_not(folder, mount.point)
    return f"cgroup {entry.path} cannot be seen from here"


def _why_not(folder: str, top: str) -> str:
    while True:
        problem = _problem(folder)
        if problem or folder == top or len(folder) <= len(top):
            return problem
        folder = posixpath.dirname(folder)


def _problem(folder: str) -> str:
    """Return what is wrong with one folder of a hierarchy, empty for nothing."""
    for path in (folder, *(f"{folder}/{name}" for name in _MEMBERS)):
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            if path == folder:
                return f"{folder} does not exist"
            continue
        except OSError as error:
            return f"cannot look at {path}: {error.strerror}"
        if found.st_uid:
            return f"{path} belongs to uid {found.st_uid}"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{path} can be written by others than root"
    return f"{folder} is delegated" if any(_marked(folder, name) for name in _MARKS) else ""


def _marked(folder: str, name: str) -> bool:
    try:
        return os.getxattr(folder, name, follow_symlinks=False) == b"1"
    except OSError:  # not set, or trusted.* without CAP_SYS_ADMIN
        return False
