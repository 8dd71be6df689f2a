"""Who may write: one process per runtime directory, and one per node.

Two daemons with different runtime directories would undo each other's affinities for ever, so the
second is refused whatever its configuration says. The node's lock is NODE_LOCK, a file that only
root can open. A daemon that looks at another state of Kata than the node's (`paths.vc`) has a lock
beside it, named after that folder's device and inode: so tests and benchmarks can run several, each
with a Kata of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
from collections.abc import Iterator
from functools import partial
from typing import Final

from msgspec import Struct

from kata_pin.base.config.tree import Config, Paths
from kata_pin.base.errors import DaemonError
from kata_pin.base.values import Remedy, here
from kata_pin.linux.files import HOST, HostRoot, read_text
from kata_pin.linux.owned_files import OUR_UID, clear, is_foreign
from kata_pin.linux.process import LockHolder, flock_holder, open_locked
from kata_pin.records.containers import Registry
from kata_pin.records.hooks import parse_spool_name

log = logging.getLogger(__name__)

NODE_LOCK: Final = "/run/kata-pin/lock"
"""The lock of the node; also that of the default runtime directory."""

_OTHER: Final = Remedy("systemctl status kata-pin", "on the node: systemctl disable --now kata-pin")
_OTHER_POD: Final = Remedy(
    "systemctl disable --now kata-pin, or exclude this node from the pod's DaemonSet",
    "exclude this node from one of the two DaemonSets",
)

_FILE: Final = "registry.db"
_OURS: Final = (_FILE, f"{_FILE}-wal", f"{_FILE}-shm", "lock")
_SPOOL: Final = "spool"
_BAD: Final = f"{_SPOOL}/bad"
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC

MAX_SPOOLED: Final = 16_384


def hand_over(runtime_dir: str, uid: int, gid: int) -> None:
    """Make the directory, and let a user without rights own it and what kata-pin keeps in it.

    Commands that root runs without a daemon leave files of root behind, and another installation
    (a package, a pod) those of its own user, whom the directory belongs to. It may belong to our
    user already, so nothing else is touched, whatever it has put there: only known names, no link,
    no file with another name elsewhere (another link), and none of a third user. Raises OSError.
    """
    os.makedirs(runtime_dir, mode=0o750, exist_ok=True)
    home = os.open(runtime_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        former = os.fstat(home).st_uid
        heir = _Heir(uid, gid, frozenset({OUR_UID, former}))
        with contextlib.suppress(FileExistsError):
            os.mkdir(_SPOOL, mode=0o700, dir_fd=home)
        for name in (_SPOOL, _BAD):
            heir.take_folder(name, home)
        for name in _OURS:
            heir.take_file(name, home)
        # the group of another installation has other members
        heir.take_ownership(home, gid=-1 if former in {OUR_UID, uid} else gid)
    finally:
        os.close(home)


def _names(folder: int) -> Iterator[str]:
    """Yield the names in an open folder, without reading all of them first."""
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry.name


class _Heir(Struct, frozen=True):
    """The user who gets files of the users `of`."""

    uid: int
    gid: int
    of: frozenset[int]

    def take_folder(self, name: str, home: int) -> None:
        """Take a folder of the spool; the messages in it stay root's."""
        try:
            folder = os.open(name, _FOLDER_FLAGS, dir_fd=home)
        except FileNotFoundError:
            return
        except NotADirectoryError:  # a link too; the daemon sets it aside
            log.warning("%s in the runtime directory is left alone: not a folder", name)
            return
        try:
            messages = _Heir(-1, self.gid, frozenset({OUR_UID}))
            for message in itertools.islice(_names(folder), MAX_SPOOLED):
                if parse_spool_name(message) is not None:
                    messages.take_file(message, folder, mode=0o640)
            self.take_ownership(folder, gid=self.gid)
        finally:
            os.close(folder)

    def take_file(self, name: str, folder: int, mode: int = 0o600) -> None:
        """Take a regular file; anything else of that name is left alone."""
        try:
            file = os.open(name, _FILE_FLAGS, dir_fd=folder)
        except FileNotFoundError:
            return
        except OSError as error:  # a link, a socket
            log.warning("%s in the runtime directory is left alone: %s", name, error.strerror)
            return
        try:
            found = os.fstat(file)
            known = found.st_uid in {*self.of, self.uid}
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and known:
                self.take_ownership(file, gid=self.gid, mode=mode)
            else:
                log.warning(
                    "%s in the runtime directory is left alone: not a file of kata-pin's", name
                )
        finally:
            os.close(file)

    def take_ownership(self, descriptor: int, *, gid: int, mode: int = 0) -> None:
        """Change mode and owner; what the user owns already is as it made it."""
        owner = os.fstat(descriptor).st_uid
        if owner not in self.of or owner == self.uid:
            return
        if mode and owner == OUR_UID:  # that of another user's file takes CAP_FOWNER
            os.fchmod(descriptor, mode)
        os.fchown(descriptor, self.uid, gid)


@contextlib.contextmanager
def held_registry(config: Config) -> Iterator[Registry]:
    """Open the registry of the runtime directory; needs the locks of `only_one`.

    Raises StateError or OSError when the directory or the file cannot be used.
    """
    runtime_dir = config.runtime_dir
    os.makedirs(runtime_dir, mode=0o750, exist_ok=True)
    path = os.path.join(runtime_dir, _FILE)
    _return(runtime_dir)  # what a command of root left there: the registry is opened as the owner
    try:
        with contextlib.closing(Registry(path, boot_id=boot_id())) as registry:
            _return(runtime_dir)
            yield registry
    finally:
        _return(runtime_dir)


@contextlib.contextmanager
def only_one(config: Config) -> Iterator[None]:
    """Make the runtime directory and hold its lock, and the node's.

    A daemon takes them before it gives up its rights. Raises DaemonError when another process holds
    one, OSError when one cannot be opened.
    """
    os.makedirs(config.runtime_dir, mode=0o750, exist_ok=True)
    with locked(config.runtime_dir), node_locked(config):
        yield


def _return(runtime_dir: str) -> None:
    """As root let the owner of the directory own what a command makes there."""
    found = os.stat(runtime_dir)
    if os.geteuid() == 0 and found.st_uid != 0:
        hand_over(runtime_dir, found.st_uid, found.st_gid)


def boot_id() -> str:
    """Return the kernel's id of this boot; raises OSError."""
    return read_text(HOST.proc("sys/kernel/random/boot_id")).strip()


def registry_copy(runtime_dir: str) -> Registry:
    """Return a copy in memory, for looking without a daemon."""
    return Registry.copy_of(os.path.join(runtime_dir, _FILE), boot_id=boot_id())


@contextlib.contextmanager
def node_locked(config: Config, *, lock: str = NODE_LOCK) -> Iterator[None]:
    """Hold the node's lock, which is taken before any right is given up, after the directory's.

    Root and the service's user can; anybody else can set no affinity either, and goes without.
    Raises DaemonError when another process holds it, OSError when it cannot be opened.
    """
    vc = config.paths.vc
    if vc != Paths().vc:
        try:
            kata = os.stat(vc)
        except OSError:  # nothing of that Kata runs yet
            yield
            return
        lock = f"{lock}-{kata.st_dev:x}-{kata.st_ino:x}"
    elif os.path.realpath(config.runtime_dir) == os.path.dirname(lock):
        yield  # the runtime directory's lock is the node's
        return
    taken = f"another kata-pin runs on this node: it holds {lock}"
    try:
        os.makedirs(os.path.dirname(lock), mode=0o750, exist_ok=True)
        _clear(lock, taken)
        _prepare(lock)
    except PermissionError:
        if not OUR_UID:
            raise
        yield
        return
    with _flocked(lock, os.O_RDWR | os.O_NOFOLLOW, taken):
        yield


def _prepare(lock: str) -> None:
    """Make the node's lock if there is none, for root and for whoever owns its folder."""
    folder = os.path.dirname(lock)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(lock, flags, 0o600)
    try:
        status, home = os.fstat(descriptor), os.stat(folder)
        if status.st_uid == OUR_UID != home.st_uid and status.st_nlink == 1:
            os.fchown(descriptor, home.st_uid, home.st_gid)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(runtime_dir: str) -> Iterator[None]:
    """Hold a runtime directory's lock.

    Raises DaemonError when another process holds it, OSError when it cannot be created.
    """
    path, flags = os.path.join(runtime_dir, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    taken = f"another kata-pin serves {runtime_dir}"
    _clear(path, taken)
    with _flocked(path, flags, taken):
        yield


def holder(runtime_dir: str, root: HostRoot = HOST) -> LockHolder:
    """Return who serves a runtime directory; nobody where its lock is missing or free."""
    try:
        descriptor = os.open(os.path.join(runtime_dir, "lock"), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return LockHolder()
    try:
        return flock_holder(descriptor, root)
    finally:
        os.close(descriptor)


def _clear(path: str, taken: str) -> None:
    """Set aside what has a lock's name and is no file of ours, unless a process has locked it.

    Raises DaemonError and OSError as _flocked does.
    """
    if is_foreign(path):
        with contextlib.suppress(OSError):  # a link, a socket: nobody can have locked it
            os.close(open_locked(path, _FILE_FLAGS, partial(_taken, taken)))
        clear(path)


def _taken(text: str, holder: LockHolder) -> DaemonError:
    return DaemonError(f"{text}{holder}", hint=here(_OTHER_POD if holder.pod else _OTHER))


@contextlib.contextmanager
def _flocked(path: str, flags: int, taken: str) -> Iterator[None]:
    """Hold flock(2). Raises OSError, and DaemonError with the text `taken` and who holds it."""
    descriptor = open_locked(path, flags, partial(_taken, taken))
    try:
        yield
    finally:
        os.close(descriptor)
