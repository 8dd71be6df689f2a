"""Checks of what may be a sandbox's VMM or shim (D5, D24).

They look at executables and at what the kernel shows; some of that can take for ever to read.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from msgspec import Struct

from kata_pin.base.errors import (
    HostError,
    KataPinError,
    NotRead,
    ParseError,
    TaskGone,
    is_transient,
)
from kata_pin.base.sandbox import Process, ProcessKey
from kata_pin.base.values import ThreadRole
from kata_pin.linux.cgroup_mounts import MAX_MOUNTINFO
from kata_pin.linux.files import HostRoot, read_bytes
from kata_pin.linux.proc import MAX_CMDLINE, ExeFile, parse_cmdline, parse_exe, status_field
from kata_pin.linux.process import task_names
from kata_pin.vmm.kinds import BUILTIN, VmmKind, kind_of, kinds_for

# Nothing of this section can be chosen by the process itself.

YOUNG_S: Final = 2.0
"""A fork may exec; until a process is so old, nothing that exec changes is remembered."""

_MAX_BYTES = 8192
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class VmmRefused(KataPinError):  # noqa: N818 - a verdict with its reason, collected by find.py
    """A candidate is not the sandbox's VMM."""


class Status(NamedTuple):
    """What is used of /proc/<pid>/status (proc_pid_status(5)).

    `uids` are the real, effective, saved and file system uid, none where they cannot be read;
    `levels` how many pid namespaces the process has a number in, from ours inwards.
    """

    tgid: int
    uids: tuple[int, ...]
    levels: int


def read_status(root: HostRoot, pid: int) -> Status:
    """Return the status of a process or thread; what cannot be read is the tid, none and 1."""
    data = _read(root.proc(pid, "status"))
    tgid = status_field(data, "Tgid") or ""
    uids = (status_field(data, "Uid") or "").split()
    levels = (status_field(data, "NSpid") or "").split()
    return Status(
        int(tgid) if tgid.isdecimal() else pid,
        tuple(int(uid) for uid in uids if uid.isdecimal()),
        max(1, len(levels)),
    )


def is_young(process: Process) -> bool:
    """Whether a process may still be between its fork and its exec."""
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return process.key.starttime / _TICKS > now_s - YOUNG_S


def started_by(process: Process, stamp_ns: int) -> bool:
    """Whether a process had started at a time of CLOCK_BOOTTIME, in ns; 0 is unknown.

    If not, its pid was another's then.
    """
    return not stamp_ns or process.key.starttime <= stamp_ns * _TICKS // 10**9 + 1


def thread_group(root: HostRoot, tid: int) -> int:
    """Return the process that a tid belongs to, the tid itself when that cannot be read.

    Hooks of Dragonball, and poststart hooks of the Go runtime, report a thread of the shim.
    """
    return read_status(root, tid).tgid


def check_namespaces(root: HostRoot, pid: int, status: Status) -> None:
    """Refuse a process of a nested pid or user namespace: shims start VMMs in the host's.

    Who makes a user namespace may mount anything there, so that the path of an executable, and that
    it was deleted, prove nothing. Every process may read another's uid_map.
    """
    if status.levels > 1:
        raise VmmRefused("it runs in its own pid namespace")
    if root.live and _read(root.proc(pid, "uid_map")) != _own_users(root):
        raise VmmRefused("it runs in its own user namespace")


@lru_cache(maxsize=1)
def _own_users(root: HostRoot) -> bytes:
    return _read(root.proc("self", "uid_map"))


def is_roots(root: HostRoot, status: Status) -> bool:
    """Whether a process is root's by every uid: not one that a setuid program started.

    In a captured tree without a status file it counts as root's.
    """
    return all(uid == 0 for uid in status.uids) and (bool(status.uids) or not root.live)


def check_runs_vm(root: HostRoot, pid: int, kind: VmmKind) -> None:
    """Refuse a shim without vCPU threads: Go's shims have the same command line."""
    tids = task_names(root, pid)
    names = (_read(root.proc(pid, "task", tid, "comm")).rstrip(b"\n") for tid in tids)
    roles = (kind.role_of(name.decode("utf-8", "backslashreplace"), ()) for name in names)
    if not any(one is not None and one.role is ThreadRole.VCPU for one in roles):
        raise VmmRefused("it is a shim that runs no VM itself")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return b""


# Which executables may be a VMM or a shim, and of which kind (D5, D24).
#
# /proc/<pid>/exe is the kernel's word, but a path in the process's own mount namespace: a container
# can have its own /usr/bin/qemu-system-x86_64. So the file has to be the very one that the host has
# at that path. One that was removed or replaced since cannot be compared; it has to be root's, and
# on a file system of the host.

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
_DEVICE: Final = re.compile(rb"^[0-9]+ [0-9]+ ([0-9]+):([0-9]+) ", re.MULTILINE)
"""The device of a mount in mountinfo."""


class Allowlist:
    """Executable paths whose last part may be a pattern; built once from settings.

    `setting` names the one that adds to them.
    """

    def __init__(
        self, root: HostRoot, executables: Iterable[str], *, setting: str = "hypervisors"
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
        """Raise VmmRefused unless a process with this file runs a listed executable of the host."""
        if not self.holds(exe.path):
            path = exe.path or "(none)"
            raise VmmRefused(f"its executable {path} is not on the allow-list (`{self._setting}`)")
        if not self._root.live:
            return
        self.check_owner(exe)
        if exe.deleted:
            if exe.device not in self._devices(exe.path):
                raise VmmRefused(
                    f"its executable {exe.path} was deleted, and is on no file system of the host"
                )
        elif not self._is_host_file(exe):
            raise VmmRefused(f"its executable is not the host's file {exe.path}")

    def check_owner(self, exe: ExeFile) -> None:
        """Raise VmmRefused unless the file is root's, and nobody else can write it."""
        if exe.uid:
            raise VmmRefused(f"its executable {exe.path} belongs to uid {exe.uid}, not to root")
        if exe.mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise VmmRefused(f"its executable {exe.path} can be written by others than root")

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
            with suppress(OSError):
                found.add(self._root.calls.stat(self._root.path(place)).device)
        with suppress(OSError):
            mounts = read_bytes(self._root.proc("self", "mountinfo"), MAX_MOUNTINFO)
            found |= {
                os.makedev(int(major), int(minor)) for major, minor in _DEVICE.findall(mounts)
            }
        return found


class VmmAllowlist(Allowlist):
    """The executables of VMMs, and which kind each one is."""

    def __init__(self, root: HostRoot, executables: Iterable[str]) -> None:
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


DEADLINE_S: Final = 0.2
"""How long one read may take; others of the same call do not wait for it."""

AT_ONCE: Final = 32
"""Processes per call: a hostile command line has 128 KiB."""

MAX_KEPT: Final = 16 * 1024 * 1024
"""Bytes of command lines that are kept; Kata's QEMU has 4 KiB, a shim 300 bytes."""

MAX_HUNG: Final = 4096
"""Processes that hung which are remembered."""

RESTS_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0, 300.0)
"""How long a process that hung is left alone, by how often it did."""

MAX_WANTED: Final = 64
"""Processes that were asked for in vain which are remembered until they are read."""

EXE_BYTES: Final = 8192


class Hung(Struct, frozen=True):
    """A process whose memory is locked: since when that is known, and how often it was tried.

    `since` and `retry_at` are times of CLOCK_MONOTONIC.
    """

    process: Process
    since: float
    tries: int
    retry_at: float


class _Facts(Struct, frozen=True):
    """What was read of a process; `name` is what it had before, None where exec changes no more.

    The command line is kept as bytes: split into 16,000 words it would take twelve times as much.
    """

    exe: ExeFile | HostError
    line: bytes | HostError
    name: str | None

    @property
    def size(self) -> int:
        return len(self.line) if isinstance(self.line, bytes) else 0


class SlowFacts:
    """What of a process can take for ever to read: its command line, and its executable's file.

    Reading a command line takes the lock of the process's memory map. Who maps a file of a file
    system that does not answer, and has a writer wait for the lock, makes every reader wait
    too, without end (a VMM on hung storage does so unwillingly). So both are read beforehand,
    with a deadline, by `Calls.read_slow`, and answered from memory here: NotRead says that they
    were not read, or hung.

    A process that hung is left alone for a while, longer each time. What is kept is bounded in
    bytes.

    One lives as long as the daemon, or one command.

    `on_hung` is called for a process that hangs for the first time.
    """

    def __init__(
        self,
        root: HostRoot,
        read_process: Callable[[int], Process],
        on_hung: Callable[[Process], None] = lambda _: None,
    ) -> None:
        self._root = root
        self._read_process = read_process
        self._on_hung = on_hung
        self._facts: dict[ProcessKey, _Facts] = {}
        self._size = 0
        self._hung: dict[ProcessKey, Hung] = {}
        self._wanted: dict[ProcessKey, Process] = {}

    # ---- answers -------------------------------------------------------------------------

    def cmdline(self, pid: int) -> Sequence[str]:
        """Return a process's arguments; raises TaskGone and NotRead."""
        line = self._of(pid, "command line").line
        if isinstance(line, HostError):
            raise line
        return parse_cmdline(line)

    def exe_file(self, pid: int) -> ExeFile:
        """Return the file that a process executes; raises HostError, NotRead among them."""
        exe = self._of(pid, "executable").exe
        if isinstance(exe, HostError):
            raise exe
        return exe

    @property
    def hung(self) -> tuple[Hung, ...]:
        """The processes that did not answer when they were asked last, the newest last."""
        return tuple(self._hung.values())

    def _of(self, pid: int, what: str) -> _Facts:
        process = self._read_process(pid)
        key = process.key
        if key in self._hung:
            raise NotRead(f"{what} of process {pid}", hung=True)
        facts = self._facts.get(key)
        if facts is not None and facts.name not in {None, process.comm}:
            self.drop(key)
            facts = None
        if facts is None:
            if len(self._wanted) < MAX_WANTED:
                self._wanted[key] = process
            raise NotRead(f"{what} of process {pid}", hung=False)
        self._facts[key] = self._facts.pop(key)  # the one used last is dropped last
        return facts

    @property
    def has_wanted(self) -> bool:
        """Whether a process was asked for in vain since `take_wanted`."""
        return bool(self._wanted)

    def take_wanted(self) -> list[Process]:
        """Return the processes that were asked for in vain since the last call."""
        wanted, self._wanted = list(self._wanted.values()), {}
        return wanted

    # ---- reading -------------------------------------------------------------------------

    def lacks(self, process: Process) -> bool:
        """Whether a process should be read now: not known, young, or due again after it hung."""
        hung = self._hung.get(process.key)
        if hung is not None:
            return time.monotonic() >= hung.retry_at
        facts = self._facts.get(process.key)
        return facts is None or facts.name is not None

    def knows(self, process: Process) -> bool:
        """Whether a process was read."""
        return process.key in self._facts

    def retry_s(self, keys: Iterable[ProcessKey]) -> float | None:
        """Return in how many seconds the first of these that hung is due again, None for none."""
        due = [self._hung[key].retry_at for key in keys if key in self._hung]
        return max(0.0, min(due) - time.monotonic()) if due else None

    async def read(self, processes: Iterable[Process]) -> int:
        """Read those that lack it; return how many were asked. Raises nothing for single ones."""
        wanted = iter({one.key: one for one in processes if self.lacks(one)}.values())
        asked = 0
        while batch := list(islice(wanted, AT_ONCE)):
            asked += len(batch)
            await self._read(batch)
        return asked

    async def _read(self, batch: Sequence[Process]) -> None:
        young = {one.key: self._name_of(one) for one in batch if is_young(one)}
        requests = [
            request
            for one in batch
            for request in ((one.pid, "exe", EXE_BYTES), (one.pid, "cmdline", MAX_CMDLINE))
        ]
        answers = await self._root.calls.read_slow(requests, DEADLINE_S)
        for one in batch:
            exe, data = answers[one.pid, "exe"], answers[one.pid, "cmdline"]
            if isinstance(exe, TimeoutError) or isinstance(data, TimeoutError):
                self._hangs(one)
                continue
            self._hung.pop(one.key, None)
            if any(isinstance(answer, OSError) and is_transient(answer) for answer in (exe, data)):
                continue  # it says nothing about the process, which is read again when asked for
            try:
                if self._read_process(one.pid).key != one.key:
                    continue
            except HostError:
                continue
            self._keep(one.key, _Facts(_exe(one, exe), _line(one, data), young.get(one.key)))

    def _name_of(self, process: Process) -> str:
        try:
            return self._read_process(process.pid).comm
        except HostError:
            return ""

    def _hangs(self, process: Process) -> None:
        now = time.monotonic()
        before = self._hung.pop(process.key, None)
        if before is None:
            self._on_hung(process)
            if len(self._hung) >= MAX_HUNG:
                del self._hung[next(iter(self._hung))]
        tries = before.tries + 1 if before else 1
        rest_s = RESTS_S[min(tries, len(RESTS_S)) - 1]
        since = before.since if before else now
        self._hung[process.key] = Hung(process, since, tries, now + rest_s)
        self.drop(process.key)

    def _keep(self, key: ProcessKey, facts: _Facts) -> None:
        self.drop(key)
        self._facts[key] = facts
        self._size += facts.size
        while self._size > MAX_KEPT:
            self.drop(next(iter(self._facts)))  # the oldest

    def drop(self, key: ProcessKey) -> None:
        """Forget what was read of a process."""
        facts = self._facts.pop(key, None)
        if facts is not None:
            self._size -= facts.size

    def forget_ended(self, alive: Container[ProcessKey]) -> None:
        """Forget all processes but these."""
        for key in [key for key in self._facts if key not in alive]:
            self.drop(key)
        for key in [key for key in self._hung if key not in alive]:
            del self._hung[key]


def _exe(process: Process, answer: bytes | OSError) -> ExeFile | HostError:
    subject = f"process {process.pid}"
    if isinstance(answer, OSError):
        return HostError("look at the executable of", subject, answer.errno or 0)
    try:
        return parse_exe(answer)
    except ParseError as error:
        return HostError(str(error), subject)


def _line(process: Process, answer: bytes | OSError) -> bytes | HostError:
    if isinstance(answer, OSError):
        return TaskGone("read cmdline of", f"process {process.pid}", answer.errno or 0)
    return answer
