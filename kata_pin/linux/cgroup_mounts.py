"""Where cgroups are seen: the mounts of their hierarchies, and our place in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.errors import HostError, is_transient
from kata_pin.linux.files import HostRoot, host_errors, read_bytes, read_text
from kata_pin.linux.proc import MAX_CGROUP, CgroupEntry, Cgroups, parse_cgroup

# In a cgroup namespace of its own, which every container without privileges has on version 2, a
# process reads the paths of cgroups relative to that namespace's root: `/../../init.scope` for the
# host's init, and `/../..` in mountinfo for a mount of the host's whole hierarchy. No file says
# which names the dots replace. But the dots of the mount say how deep the namespace's root is, and
# of the cgroups so deep only one contains this process; so the hierarchy itself has the names (ADR
# 17).
#
# Facts are in cgroup_namespaces(7), proc_pid_mountinfo(5), proc_pid_cgroup(5).

MAX_MOUNTINFO: Final = 4 * 1024 * 1024
"""Most that is read of mountinfo: a node with 250 pods has a few thousand mounts."""

MAX_FOLDERS: Final = 65_536
"""Most cgroups of one depth among which our own is looked for."""

_MAX_MEMBERS: Final = 1024 * 1024

_OCTAL: Final = re.compile(r"\\([0-7]{3})")


class CgroupMount(Struct, frozen=True):
    """A mounted hierarchy that can carry a controller, of cgroup v1 or v2.

    `root` is the cgroup seen at `point`.
    """

    v1: bool
    root: str
    point: str

    def folder(self, cgroup: str) -> str | None:
        """Return the folder of a cgroup, None if it cannot be seen below this mount.

        A path with ``..`` leads to a cgroup whose name is not known.
        """
        if ".." in cgroup.split("/"):
            return None
        base = self.root.rstrip("/")
        if cgroup != base and not cgroup.startswith(f"{base}/"):
            return None
        return self.point + cgroup.removeprefix(base).rstrip("/")


def cgroup_mounts(root: HostRoot, controller: str = "cpuset") -> tuple[CgroupMount, ...]:
    """Return the mounts of v1's controller and of v2, in mount order; none if unreadable.

    Raises HostError if they cannot be read for a passing reason.
    """
    namespace = _namespace(root.root)
    found = []
    for mount, controllers in _mounts(root):
        if not mount.v1 or controller in controllers:
            own = next((path for key, path in namespace.items() if _is_of(key, controllers)), "/")
            seen = host_path(own, mount.root)
            found.append(mount if seen is None else replace(mount, root=seen))
    return tuple(found)


def read_cgroups(root: HostRoot, data: bytes) -> Cgroups:
    """Return the content of /proc/<pid>/cgroup, with the paths that the host's processes read.

    Paths whose names cannot be found out keep their ``..``. Raises ParseError, and HostError as
    `cgroup_mounts` does.
    """
    cgroups = parse_cgroup(data)
    namespace = _namespace(root.root)
    if not namespace:
        return cgroups
    return Cgroups(tuple(_as_host_reads(entry, namespace) for entry in cgroups.entries))


def _as_host_reads(entry: CgroupEntry, namespace: Mapping[tuple[str, ...], str]) -> CgroupEntry:
    own = namespace.get(entry.controllers)
    path = None if own is None else host_path(own, entry.path)
    return entry if path is None else entry._replace(path=path)


def host_path(namespace: str, path: str) -> str | None:
    """Return the path of a cgroup in the whole hierarchy; `path` is relative to the namespace.

    `namespace` is the path of the namespace's root. None if `path` leads above the hierarchy.
    """
    parts = [part for part in namespace.split("/") if part]
    for part in path.split("/"):
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part:
            parts.append(part)
    return f"/{'/'.join(parts)}"


class _Listed(NamedTuple):
    """A mount of mountinfo; `controllers` are v1's, among the mount's other options."""

    mount: CgroupMount
    controllers: frozenset[str]


def _mounts(root: HostRoot) -> Iterator[_Listed]:
    path = root.proc("self/mountinfo")
    try:
        text = read_text(path, MAX_MOUNTINFO)
    except OSError as error:
        if is_transient(error):
            raise HostError("read", path, error.errno or 0) from error
        return
    for line in text.split("\n"):
        place, _, filesystem = line.partition(" - ")
        left, right = place.split(" "), filesystem.split(" ")
        if len(left) >= 5 and len(right) >= 3 and right[0] in {"cgroup", "cgroup2"}:
            v1 = right[0] == "cgroup"
            mount = CgroupMount(v1, _unescaped(left[3]), root.path(_unescaped(left[4])))
            yield _Listed(mount, frozenset(right[2].split(",")) if v1 else frozenset())


def _unescaped(text: str) -> str:
    """Return a path of mountinfo as it is: blanks and backslashes stand there in octal."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def _is_of(entry: tuple[str, ...], controllers: frozenset[str]) -> bool:
    """Return whether a mount's controllers are those of an entry of /proc/<pid>/cgroup."""
    return bool(entry) == bool(controllers) and controllers.issuperset(entry)


@cache
def _namespace(root: str) -> Mapping[tuple[str, ...], str]:
    """Return the root of our cgroup namespace in each hierarchy, by its controllers.

    Without those whose names are not hidden, or cannot be found out. A process never changes its
    namespace, so this is found once. Raises HostError for a passing reason.
    """
    host = HostRoot(root)
    hidden = [one for one in _mounts(host) if _levels(one.mount.root)]
    if not hidden:
        return {}
    path = host.proc("self/cgroup")
    with host_errors("read", path):
        pid = os.readlink(host.proc("self"))
        entries = parse_cgroup(read_bytes(path, MAX_CGROUP)).entries
    hidden.sort(key=lambda one: -_levels(one.mount.root))  # the one that shows most comes first
    found = {}
    for entry in entries:
        mounts = [one.mount for one in hidden if _is_of(entry.controllers, one.controllers)]
        places = (_own_place(mount, entry.path, pid.encode()) for mount in mounts)
        place = next((one for one in places if one is not None), None)
        if place is not None:
            found[entry.controllers] = place
    return found


def _levels(root: str) -> int:
    """Return how many levels above our namespace a mount begins; 0 if it is not right above."""
    parts = root.split("/")[1:]
    return len(parts) if set(parts) == {".."} else 0


def _own_place(mount: CgroupMount, inside: str, pid: bytes) -> str | None:
    """Return the path of our namespace's root below a mount, None if it is not found there.

    `inside` is our cgroup, relative to the namespace. The pid is the host's own if we are in its
    pid namespace, without which no thread could be pinned anyway.
    """
    if ".." in inside.split("/"):  # somebody moved this process out of its namespace's root
        return None
    level = [""]
    for _ in range(_levels(mount.root)):
        level = [f"{above}/{name}" for above in level for name in _children(mount.point + above)]
        if len(level) > MAX_FOLDERS:
            return None
    members = inside.rstrip("/") + "/cgroup.procs"
    for cgroup in level:
        try:
            listed = read_bytes(f"{mount.point}{cgroup}{members}", _MAX_MEMBERS)
        except OSError as error:  # it was removed; a threaded one cannot be read
            _pass_on(error, mount.point)
        else:
            if pid in listed.split():
                return cgroup
    return None


def _children(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        _pass_on(error, folder)
        return []


def _pass_on(error: OSError, path: str) -> None:
    """Raise HostError for a passing reason: what it hides would never be looked for again."""
    if is_transient(error):
        raise HostError("read", path, error.errno or 0) from error
