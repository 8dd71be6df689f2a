"""Which processes, files and sockets the broker touches, whatever the daemon asks."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from errno import EACCES, EINVAL, ENOTSOCK, ESTALE
from fnmatch import fnmatchcase
from typing import Final

from kata_pin.broker.affinity import STAT_BYTES
from kata_pin.broker.jails import check_jailed, parts_of
from kata_pin.broker.libc import status_of
from kata_pin.broker.trust import trusted_uid

_PF_KTHREAD: Final = 0x0020_0000
_KTHREADD: Final = 2
_WORKER: Final = re.compile(rb"(?:vhost-|kvm-pit/|kvm-nx-lpage-re(?:covery-)?)([0-9]{1,10})\Z")
_DELETED: Final = " (deleted)"
_FILES: Final = frozenset({"config.json", "persist.json", "state.json", "pid"})
_SYSTEM: Final = ("/", "/usr", "/usr/libexec", "/usr/local", "/opt", "/opt/kata")
_FILE_SERVERS: Final = ("virtiofsd*", "nydusd*")

MAX_JAILS: Final = 4096
"""Processes whose jails are remembered."""


class Policy:
    """What the first message allows, and what is verified by it."""

    def __init__(self, setup: bytes) -> None:
        """`setup` has the rules, each a letter and its value, with a zero byte between two.

        x: pattern of a VMM's executable; s: of a shim's; f: a folder; u: a folder of which only
        sockets may be connected to; c: a socket; i: a file, whose folder may be watched; j: a
        folder of jails; q: a class of resctrl, and after a blank its schemata.
        """
        rules = [os.fsdecode(one) for one in setup.split(b"\0") if one]
        values = {kind: [one[1:] for one in rules if one[0] == kind] for kind in "xsfucijq"}
        self.vmms = [os.path.split(path) for path in values["x"]]
        self._programs = [*self.vmms, *(os.path.split(path) for path in values["s"])]
        self.sockets = frozenset(values["c"])
        self.files = frozenset(values["i"])
        self.folders = _resolved(values["f"])
        self._of_files = _resolved(map(os.path.dirname, self.files))
        self.of_sockets = self.folders | _resolved(values["u"])
        self._owners = {0, trusted_uid()}
        self._jail_bases = frozenset(map(os.path.normpath, values["j"]))
        self.classes = {
            name: lines for name, _, lines in (one.partition(" ") for one in values["q"])
        }
        self._jails: dict[int, str] = {}
        """Where to look for the jail of a process; it is verified anew each time."""

    def may_change(self, tgid: int) -> bool:
        """Whether a process is a VMM or its file server, or a kernel thread that works for one."""
        try:
            target = os.readlink(f"/proc/{tgid}/exe")
        except FileNotFoundError:
            return self._is_worker(tgid)
        if tgid in self._jails and target.count("/") == 1:
            return self._is_jailed(tgid, target)
        path = target.removesuffix(_DELETED)
        folder, name = os.path.split(path)
        vmm = _matches(self.vmms, folder, name)
        server = any(fnmatchcase(name, one) for one in _FILE_SERVERS)
        return (
            (vmm or server)
            and self._is_trusted(tgid, path if vmm and path == target else "")
            and (_is_hosts(tgid) or (server and self._is_half(tgid)))
        )

    def verify_jail(self, pid: int, jail: str) -> None:
        """Raise OSError unless a process is a VMM in this jail (broker/jails.py).

        From then on its threads may be set, as long as that is so.
        """
        self._jails.pop(pid, None)
        base, program, _ = parts_of(jail)
        if os.path.normpath(base) not in self._jail_bases or not any(
            fnmatchcase(program, name) for _, name in self.vmms
        ):
            raise OSError(EACCES, "below no folder of jails, or no VMM")
        if os.readlink(f"/proc/{pid}/exe") != f"/{program}" or not _is_hosts(pid):
            raise OSError(ESTALE, "the process runs another program, or in another namespace")
        check_jailed(pid, jail, self._owners)
        if len(self._jails) >= MAX_JAILS:
            del self._jails[next(iter(self._jails))]
        self._jails[pid] = jail

    def _is_jailed(self, tgid: int, path: str) -> bool:
        """Whether a process that was in a jail still runs its program in it."""
        jail = self._jails[tgid]
        try:
            check_jailed(tgid, jail, self._owners)
        except OSError:
            return False
        return path == f"/{parts_of(jail)[1]}" and _is_hosts(tgid)

    def _is_half(self, tgid: int) -> bool:
        """Whether it is the half that a file server of the host put into a pid namespace.

        Nobody in a container has a parent outside of it that is such a server.
        """
        parent = int(field(tgid, b"PPid")[0])
        name = os.path.basename(os.readlink(f"/proc/{parent}/exe").removesuffix(_DELETED))
        return (
            any(fnmatchcase(name, one) for one in _FILE_SERVERS)
            and self._is_trusted(parent, "")
            and _is_hosts(parent)
        )

    def _is_trusted(self, tgid: int, path: str) -> bool:
        """Whether the executable is the administrator's, and the host's file of that path.

        Without a path (a file server, a VMM that was updated since): a file of the host's system.
        No path that a process chose is looked up: that may hang in a file system of its own.
        """
        theirs = status_of(f"/proc/{tgid}/exe")
        if theirs.uid not in self._owners or theirs.mode & 0o022 or not stat.S_ISREG(theirs.mode):
            return False
        if not path:
            return theirs.device in self._system_devices()
        ours = status_of(path)
        return (ours.device, ours.inode) == (theirs.device, theirs.inode)

    def _system_devices(self) -> set[int]:
        """Return the file systems that hold the host's programs."""
        found = set()
        for folder in {*_SYSTEM, *(folder for folder, _ in self.vmms)}:
            with suppress(OSError):
                found.add(status_of(folder).device)
        return found

    def _is_worker(self, pid: int) -> bool:
        """Whether a kernel thread works for a verified VMM (before Linux 6.4)."""
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            head, _, rest = file.read(STAT_BYTES).rpartition(b")")
        words = rest.split()
        worker = _WORKER.match(head.partition(b"(")[2])
        if int(words[1]) != _KTHREADD or not int(words[6]) & _PF_KTHREAD or worker is None:
            return False
        owner = int(field(int(worker[1]), b"Tgid")[0])
        return bool(os.readlink(f"/proc/{owner}/exe")) and self.may_change(owner)

    def is_named(self, path: str) -> bool:
        """Whether a path is that of a socket, of a program (a VMM, a shim) or of its folder."""
        return (
            path in self.sockets
            or _matches(self._programs, *os.path.split(path))
            or any(path == folder for folder, _ in self._programs)
        )

    def open_below(self, path: str, flags: int) -> int:
        """Open something below an allowed folder, or an allowed file; follows no link there."""
        return _open_below(self._of_files if path in self.files else self.folders, path, flags)

    def open_file(self, path: str) -> int:
        """Open a regular file to be read: of Kata, of KVM, of a bundle, or an allowed one.

        Not any other: below a bundle's folder there may be the container's own file system.
        """
        known = path in self.files or os.path.basename(path) in _FILES or self._is_jails_pid(path)
        if not known:
            raise OSError(EACCES, "not a file that may be read")
        fd = self.open_below(path, os.O_RDONLY)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(EINVAL, "not a regular file")
        return fd

    def _is_jails_pid(self, path: str) -> bool:
        """Whether a path is that of the file in which a jailer leaves the pid of its VMM."""
        jail, _, file = path.rpartition("/")
        try:
            base, program, _ = parts_of(jail)
        except ValueError:
            return False
        return base in self._jail_bases and file == f"{program}.pid"

    def open_socket(self, path: str) -> int:
        """Open a socket as a path (O_PATH), below an allowed folder; raises OSError for others."""
        fd = _open_below(self.of_sockets, path, os.O_PATH)
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(ENOTSOCK, "not a socket")
        return fd

    def open_to_watch(self, path: str) -> int:
        """Open what may be watched: what is below an allowed folder, or a folder above one."""
        above = path if path.endswith("/") else f"{path}/"
        if any(folder.startswith(above) for folder in (*self.folders, *self.files)):
            return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return self.open_below(path, os.O_PATH)


def _matches(patterns: Iterable[tuple[str, str]], folder: str, name: str) -> bool:
    """Whether a path fits a pattern, whose last part is one for fnmatch."""
    return any(folder == where and fnmatchcase(name, what) for where, what in patterns)


def _is_hosts(pid: int) -> bool:
    """Whether a process is in our own pid namespace, the host's."""
    return len(field(pid, b"NSpid")) == 1


def field(pid: int, name: bytes) -> list[bytes]:
    """Return the words of one field of /proc/<pid>/status, which escapes newlines in names."""
    with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
        for line in file.read(2 * STAT_BYTES).split(b"\n"):
            key, _, value = line.partition(b":")
            if key == name:
                return value.split()
    return []


def _resolved(folders: Iterable[str]) -> dict[str, str]:
    """Return folders as they are spelled and as they are resolved, each with the latter."""
    pairs = [(os.path.normpath(folder), os.path.realpath(folder)) for folder in folders]
    return dict(pairs) | {resolved: resolved for _, resolved in pairs}


def _open_below(folders: Mapping[str, str], path: str, flags: int) -> int:
    """Open what is below one of the folders; a path that is not normal is refused."""
    parts = path.split("/")
    if parts[0] or any(one in {"", ".", ".."} for one in parts[1:]):
        raise OSError(EINVAL, "not a normal path")
    for depth in range(len(parts), 0, -1):
        base = folders.get("/".join(parts[:depth]))
        if base is not None:
            return walk(base, parts[depth:], flags)
    raise OSError(EACCES, "below no allowed folder")


def walk(base: str, parts: Sequence[str], flags: int) -> int:
    """Open `base`, then each part in the one before; only `base` may be a link."""
    # O_NONBLOCK: opening a FIFO that somebody put there must not hang; regular files ignore it.
    folder = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    if not parts:
        return os.open(base, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    here = os.open(base, folder)
    try:
        for part in parts[:-1]:
            inner = os.open(part, folder | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = inner
        return os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=here)
    finally:
        os.close(here)
