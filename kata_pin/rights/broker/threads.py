"""Threads of a VMM: what the kernel and QEMU show of them, who they are, and changing them."""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from errno import EACCES, EINVAL, EMSGSIZE, EPROTO, ESRCH, ESTALE, ETIMEDOUT
from typing import Final, NamedTuple

from kata_pin.rights.broker.files import links_in, names_in
from kata_pin.rights.broker.libc import AT_EMPTY_PATH, AT_SYMLINK_NOFOLLOW, libc, status_of
from kata_pin.rights.broker.living import STAT_BYTES, folder_of
from kata_pin.rights.broker.protocol import AffinityChange, Changed, FileStatus

# Changing threads, and making sure of each one's identity (linux/affinity.py says how).

_GONE: Final = (FileNotFoundError, ProcessLookupError)

Set = Callable[[int, Iterable[int]], None]
Get = Callable[[int], Iterable[int]]


def change_threads(
    changes: Sequence[AffinityChange],
    proc: str = "/proc",
    set_one: Set = os.sched_setaffinity,
    get_one: Get = os.sched_getaffinity,
) -> list[Changed]:
    """Call `set_one` for each thread with its CPUs, and `get_one` for what it then has.

    In their order; one that fails does not stop the rest. How a thread's identity is made sure of
    before and after: linux/affinity.py.
    """
    tgids = {change.tgid for change in changes if change.inode}
    before = {tgid: _inodes(proc, tgid) for tgid in tgids}
    done: list[Changed] = []
    sure: list[int] = []
    for number, change in enumerate(changes):
        if change.inode and before[change.tgid].get(change.tid) == change.inode:
            sure.append(number)
            done.append(_set(change, set_one, get_one))
        else:
            done.append(_set_checked(change, proc, set_one, get_one))
    after = {tgid: _inodes(proc, tgid) for tgid in tgids}
    for number in sure:
        now = after[changes[number].tgid].get(changes[number].tid)
        if now != changes[number].inode:
            done[number] = Changed(ESRCH if now is None else ESTALE)
    return done


def _set(change: AffinityChange, set_one: Set, get_one: Get) -> Changed:
    """Change a thread and read back what it has."""
    try:
        set_one(change.tid, change.cpus)
        return Changed(0, frozenset(get_one(change.tid)))
    except OSError as error:
        return Changed(error.errno or EINVAL)


def _set_checked(change: AffinityChange, proc: str, set_one: Set, get_one: Get) -> Changed:
    """Set it between two looks at the thread's stat file, through one descriptor."""
    path, fd = f"{proc}/{change.tgid}/task/{change.tid}/stat", -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if _starttime(fd) != change.starttime:
            return Changed(ESTALE)
        changed = _set(change, set_one, get_one)
        return changed if _starttime(fd) == change.starttime else Changed(ESTALE)
    except OSError as error:
        return Changed(ESRCH if isinstance(error, _GONE) else error.errno or EINVAL)
    finally:
        if fd >= 0:
            os.close(fd)


def _inodes(proc: str, tgid: int) -> dict[int, int]:
    """Return the inode of each thread's folder, by tid; empty without the process."""
    try:
        with os.scandir(f"{proc}/{tgid}/task") as entries:
            return {int(entry.name): entry.inode() for entry in entries}
    except _GONE:
        return {}


def _starttime(fd: int) -> int:
    """Return when a thread started, by its open stat file (proc_pid_stat(5), field 22)."""
    return int(stat_fields(fd)[19])


def stat_fields(fd: int) -> list[bytes]:
    """Return the fields of an open stat file, from the third on (proc_pid_stat(5))."""
    return os.pread(fd, STAT_BYTES, 0).rpartition(b")")[2].split()


# Scheduling classes of vCPU threads: real-time ones only where they cannot spread.
#
# Whatever the daemon asks, a thread becomes real-time only if it has the name that VMMs give a vCPU
# and may run on a single CPU, and what it starts does not inherit the class. Any thread of a
# verified process can be given back an ordinary one.

MOST_PRIORITY: Final = 49
"""Below threaded interrupt handlers, which have 50 (kernel/sched/syscalls.c, sched_set_fifo)."""

_REALTIME: Final = frozenset({os.SCHED_FIFO, os.SCHED_RR})
ORDINARY: Final = frozenset({os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE})


def set_classes(
    changes: Sequence[AffinityChange],
    policy: int,
    priority: int,
    proc: str = "/proc",
    *,
    vcpus: Sequence[str] = (),
) -> list[Changed]:
    """Give threads a class; OSError for one that may not be given, else one errno per thread.

    `vcpus` are patterns of the names of threads that may become real-time ones.
    """
    realtime = policy in _REALTIME
    if realtime and not 0 < priority <= MOST_PRIORITY:
        raise OSError(EINVAL, "no priority for a vCPU")
    if not realtime and (policy not in ORDINARY or priority):
        raise OSError(EINVAL, "no such class")
    tgids = {one.tid: one.tgid for one in changes}

    def give(tid: int, _: object) -> None:
        if not realtime:
            os.sched_setscheduler(tid, policy, os.sched_param(0))
            return
        is_vcpu = _is_named(f"{proc}/{tgids[tid]}/task/{tid}/comm", vcpus)
        if not is_vcpu or len(os.sched_getaffinity(tid)) != 1:
            raise OSError(EACCES, "no vCPU with a CPU of its own")
        os.sched_setscheduler(tid, policy | os.SCHED_RESET_ON_FORK, os.sched_param(priority))

    return change_threads(changes, proc, give, lambda _: ())


def _is_named(path: str, patterns: Sequence[str]) -> bool:
    with open(path, "rb", buffering=0) as file:
        name = file.read(64).rstrip(b"\n").decode("ascii", "replace")
    return any(re.fullmatch(pattern, name) for pattern in patterns)


# What the kernel shows of a VMM's vCPUs: KVM's debugfs, open descriptors, and system calls.
#
# Texts are the kernel's own; the daemon parses them (vmm/roles.py).

MAX_OPEN: Final = 2048
"""Most descriptors of a process that are looked at: the oldest numbers, vCPUs' and devices' own."""

MAX_PIDS: Final = 256
MAX_TIDS: Final = 1024
MAX_VMS: Final = 65_536
MAX_VCPUS: Final = 4096
_BYTES: Final = 512

_KVM_VCPU: Final = re.compile(r"vcpu([0-9]{1,5})\Z")
_KNOWN: Final = re.compile(r"anon_inode:kvm-vcpu:[0-9]{1,10}\Z|/dev/vfio/[A-Za-z0-9/-]{1,64}\Z")
_DESCRIPTOR: Final = re.compile(rb"[0-9]+ (0x[0-9a-f]{1,8}) ")


class ThreadCall(NamedTuple):
    """What a thread waits in (/proc/<pid>/task/<tid>/syscall), empty where that is not shown.

    `link` is where its first argument leads, if that is a vCPU's descriptor.
    """

    text: str
    link: str = ""


class KvmVcpu(NamedTuple):
    """A vCPU of KVM's debugfs: its id, the thread that last ran it, and when it was made (ns)."""

    number: int
    tid: int
    created_ns: int


def system_calls(process: str, tids: Sequence[int]) -> list[ThreadCall]:
    """Return what threads wait in; `process` is the process's folder in /proc. It may hang."""
    proc, _, pid = process.rpartition("/")
    shown = folder_of(int(pid), proc)
    return [_system_call(f"{process}/task/{tid}/syscall", f"{shown}/fd") for tid in tids]


def _system_call(path: str, descriptors: str) -> ThreadCall:
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.read(_BYTES)
    except OSError:
        return ThreadCall("")
    link, match = "", _DESCRIPTOR.match(text)
    if match is not None:
        with suppress(OSError):
            link = os.readlink(f"{descriptors}/{int(match[1], 16)}")
    return ThreadCall(text.decode("ascii", "replace").strip(), link if _KNOWN.match(link) else "")


def descriptors(process: str) -> list[str]:
    """Return where descriptors of vCPUs and of VFIO lead, among the first MAX_OPEN; OSError.

    `process` is the process's folder in /proc.
    """
    proc, _, pid = process.rpartition("/")
    links = links_in(f"{folder_of(int(pid), proc)}/fd", MAX_OPEN)
    return [link for link in links if _KNOWN.match(link)]


def kvm_vcpus(folder: str, tids: Collection[int]) -> Iterator[KvmVcpu]:
    """Yield the vCPUs of the VMs that one of these threads made; `folder` is debugfs's `kvm`."""
    with suppress(OSError):
        for vm in names_in(folder, MAX_VMS):
            maker = vm.partition("-")[0]
            if maker.isdigit() and int(maker) in tids:
                yield from _of_vm(f"{folder}/{vm}")


def _of_vm(vm: str) -> Iterator[KvmVcpu]:
    with suppress(OSError):
        for name in names_in(vm, MAX_VCPUS):
            match = _KVM_VCPU.match(name)
            if match is None:
                continue
            with suppress(OSError, ValueError):
                created_ns = os.stat(f"{vm}/{name}").st_mtime_ns
                with open(f"{vm}/{name}/pid", "rb", buffering=0) as file:
                    yield KvmVcpu(int(match[1]), int(file.read(32)), created_ns)


# Asking a QEMU over QMP which thread is which vCPU and iothread: two queries, and nothing else.
#
# No socket to a QEMU's monitor leaves the process that connects: whoever has one can have QEMU
# start programs (`migrate exec:`). The answers are not parsed here, only told from events by their
# first bytes: QEMU writes one message per line, and answers in the order of the commands
# (qmp-spec).

COMMANDS: Final = (b"qmp_capabilities", b"query-cpus-fast", b"query-iothreads")

MAX_GREETING: Final = 4096
"""Longest first line: QEMU 9 sends 150 bytes."""

MAX_REPLY: Final = 2 * 1024 * 1024
"""Most bytes of a session: 4,096 vCPUs take about 1.2 MB."""

_RECEIVE: Final = 64 * 1024
_ANSWERS: Final = (b'{"return":', b'{"error":')


class _Lines:
    """Reads lines from a connection, until deadlines, and no more bytes than MAX_REPLY."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._data = bytearray()
        self._seen = 0

    def next(self, limit: int, deadline: float) -> bytes:
        """Return the next line; raises OSError: EPROTO at the end, EMSGSIZE, ETIMEDOUT."""
        start = 0
        while (at := self._data.find(b"\n", start)) < 0:
            start = len(self._data)
            if start > limit:
                raise OSError(EMSGSIZE, "longer than any answer of QEMU")
            left = deadline - time.monotonic()
            if left <= 0:
                raise OSError(ETIMEDOUT, "no answer in time")
            self._end.settimeout(left)
            try:
                data = self._end.recv(_RECEIVE)
            except TimeoutError as error:
                raise OSError(ETIMEDOUT, "no answer in time") from error
            if not data:
                raise OSError(EPROTO, "QEMU closed the connection")
            self._seen += len(data)
            if self._seen > MAX_REPLY:
                raise OSError(EMSGSIZE, "longer than any answer of QEMU")
            self._data += data
        line = bytes(self._data[:at])
        del self._data[: at + 1]
        if len(line) > limit:
            raise OSError(EMSGSIZE, "longer than any answer of QEMU")
        return line.strip()


def converse(end: socket.socket, greeting_s: float, session_s: float) -> bytes:
    """Return the two answers, a line each, of a QEMU that was just connected to; raises OSError.

    The commands are sent at once: each that waited for the answer before would cost a turn of
    QEMU's main loop.
    """
    began, lines = time.monotonic(), _Lines(end)
    if not lines.next(MAX_GREETING, began + min(greeting_s, session_s)).startswith(b'{"QMP":'):
        raise OSError(EPROTO, "no QMP greeting")
    end.settimeout(max(0.001, began + session_s - time.monotonic()))
    end.sendall(b"".join(b'{"execute":"%s"}\r\n' % command for command in COMMANDS))
    answers = []
    for _ in COMMANDS:
        line = lines.next(MAX_REPLY, began + session_s)
        while not line.startswith(_ANSWERS):
            line = lines.next(MAX_REPLY, began + session_s)
        answers.append(line)
    return b"\n".join(answers[1:])


# Jails: Firecracker's jailer starts a VMM with a root folder and a program of its sandbox's own.
#
# Such a program shows `/firecracker` as its path, in a mount namespace of its own. What it is and
# where it runs is verified by the files themselves: the process's root is the jail's folder, and
# its executable the jail's program, by inode; and only root may write there.

ROOT: Final = "root"
"""The folder of a jail that becomes the process's root (jailer/src/env.rs, chroot_dir)."""

_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def parts_of(jail: str) -> tuple[str, str, str]:
    """Return where jails are, the program's name and the jail's id; ValueError for another path.

    A jail is `<base>/<program>/<id>/root` (firecracker/docs/jailer.md).
    """
    base, program, name, root = jail.rsplit("/", 3)
    if root != ROOT or {program, name} & {"", ".", ".."}:
        raise ValueError("not the path of a jail")
    return base, program, name


def check_jailed(pid: int, jail: str, owners: Collection[int]) -> None:
    """Raise OSError unless a process runs the program of a jail, in it.

    EACCES: others than `owners` (root, and us) may write to the jail or its program. ESTALE: the
    process has another root, or runs another file. EINVAL: that is no jail's path.
    """
    try:
        base, program, name = parts_of(jail)
    except ValueError as error:
        raise OSError(EINVAL, str(error)) from error
    here = os.open(base, _FOLDER)
    try:
        _require_owned(_status(here), owners)
        for part in (program, name, ROOT):
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = inner
            _require_owned(_status(here), owners)
        file = libc().statx(here, program, AT_SYMLINK_NOFOLLOW)
        if not stat.S_ISREG(file.mode):
            raise OSError(EACCES, "its program is not a file")
        _require_owned(file, owners)
        process = folder_of(pid)
        runs_it = _is_same(status_of(f"{process}/exe"), file)
        if not runs_it or not _is_same(status_of(f"{process}/root"), _status(here)):
            raise OSError(ESTALE, "the process has another root, or runs another file")
    finally:
        os.close(here)


def _status(folder: int) -> FileStatus:
    return libc().statx(folder, "", AT_EMPTY_PATH)


def _require_owned(found: FileStatus, owners: Collection[int]) -> None:
    if found.uid not in owners or found.mode & _WRITABLE:
        raise OSError(EACCES, "others than root may write there")


def _is_same(one: FileStatus, other: FileStatus) -> bool:
    return (one.device, one.inode) == (other.device, other.inode)
