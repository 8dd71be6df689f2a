"""Which processes the broker touches, whatever the daemon asks."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from errno import EACCES, ESRCH, ESTALE
from fnmatch import fnmatchcase
from typing import Final

from kata_pin.rights.broker.files import trusted_uid
from kata_pin.rights.broker.libc import status_of
from kata_pin.rights.broker.living import STAT_BYTES, executable_of
from kata_pin.rights.broker.protocol import Settings
from kata_pin.rights.broker.threads import ROOT as JAIL
from kata_pin.rights.broker.threads import check_jailed, parts_of

_PF_KTHREAD: Final = 0x0020_0000
_KTHREADD: Final = 2
_WORKER: Final = re.compile(rb"(?:vhost-|kvm-pit/|kvm-nx-lpage-re(?:covery-)?)([0-9]{1,10})\Z")
_DELETED: Final = " (deleted)"
_SYSTEM: Final = ("/", "/usr", "/usr/libexec", "/usr/local", "/opt", "/opt/kata")
_FILE_SERVERS: Final = ("virtiofsd*", "nydusd*")

MAX_JAILS: Final = 4096
"""Processes whose jails are remembered."""


class VmmPolicy:
    """Which processes are VMMs, by the settings of the first message and what is verified."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.owners = {0, trusted_uid()}
        self._vmms = [os.path.split(path) for path in settings.vmms]
        self._jails: dict[int, str] = {}
        """Where to look for the jail of a process; it is verified again each time."""

    def may_change(self, tgid: int) -> bool:
        """Whether a process is a VMM or its file server, or a kernel thread that works for one."""
        try:
            link, target = executable_of(tgid)
        except FileNotFoundError:
            return self._is_worker(tgid)
        if tgid in self._jails and target.count("/") == 1:
            return self._is_jailed(tgid, target)
        path = target.removesuffix(_DELETED)
        folder, name = os.path.split(path)
        vmm = _matches(self._vmms, folder, name)
        server = any(fnmatchcase(name, one) for one in _FILE_SERVERS)
        return (
            (vmm or server)
            and self._is_trusted(link, path if vmm and path == target else "")
            and (_is_hosts(tgid) or (server and self._is_half(tgid)))
        )

    def verify_jail(self, pid: int, base: str, program: str, sandbox: str) -> None:
        """Raise OSError unless a process is a VMM in this jail (rights/broker/threads.py).

        From then on its threads may be set, as long as that is so.
        """
        self._jails.pop(pid, None)
        if not any(fnmatchcase(program, name) for _, name in self._vmms):
            raise OSError(EACCES, "no VMM")
        if executable_of(pid)[1] != f"/{program}" or not _is_hosts(pid):
            raise OSError(ESTALE, "the process runs another program, or in another namespace")
        jail = f"{base}/{program}/{sandbox}/{JAIL}"
        check_jailed(pid, jail, self.owners)
        if len(self._jails) >= MAX_JAILS:
            del self._jails[next(iter(self._jails))]
        self._jails[pid] = jail

    def refusal(self, tgid: int) -> int:
        """Return why a process is not touched: an errno, 0 if it may be.

        One that is not there is never tried: its number may be the next that is given out.
        """
        try:
            return 0 if self.may_change(tgid) else EACCES
        except (FileNotFoundError, ProcessLookupError):
            return ESRCH
        except (OSError, ValueError, IndexError):
            return EACCES

    def require(self, pid: int) -> None:
        """Raise OSError unless a process may be touched."""
        refusal = self.refusal(pid)
        if refusal:
            raise OSError(refusal, "not a process of a sandbox")

    def _is_jailed(self, tgid: int, path: str) -> bool:
        """Whether a process that was in a jail still runs its program in it."""
        jail = self._jails[tgid]
        try:
            check_jailed(tgid, jail, self.owners)
        except OSError:
            return False
        return path == f"/{parts_of(jail)[1]}" and _is_hosts(tgid)

    def _is_half(self, tgid: int) -> bool:
        """Whether it is the half that a file server of the host put into a pid namespace.

        Nobody in a container has a parent outside of it that is such a server.
        """
        parent = int(field(tgid, b"PPid")[0])
        link, target = executable_of(parent)
        name = os.path.basename(target.removesuffix(_DELETED))
        return (
            any(fnmatchcase(name, one) for one in _FILE_SERVERS)
            and self._is_trusted(link, "")
            and _is_hosts(parent)
        )

    def _is_trusted(self, link: str, path: str) -> bool:
        """Whether the executable behind a link of /proc is the administrator's file on the host.

        It must be the one of that path, or without a path (a file server, a VMM that was updated
        since) a file of the host's system.
        No path that a process chose is looked up: that may hang in a file system of its own.
        """
        theirs = status_of(link)
        if theirs.uid not in self.owners or theirs.mode & 0o022 or not stat.S_ISREG(theirs.mode):
            return False
        if not path:
            return theirs.device in self._system_devices()
        ours = status_of(path)
        return (ours.device, ours.inode) == (theirs.device, theirs.inode)

    def _system_devices(self) -> set[int]:
        """Return the file systems that hold the host's programs."""
        found = set()
        for folder in {*_SYSTEM, *(folder for folder, _ in self._vmms)}:
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
        return bool(executable_of(owner)[1]) and self.may_change(owner)


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
