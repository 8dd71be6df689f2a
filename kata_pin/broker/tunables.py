"""Files of the kernel that the daemon has written, and irqbalance's socket (docs/broker.md).

A request names a kind and which one of it, such as an interrupt's number; the path is made here, so
none comes from outside. What a name and a value may look like is checked, what the value means is
the kernel's business.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from errno import EACCES, EINVAL, EPERM, ESRCH
from typing import Final, NamedTuple

MAX_WRITES: Final = 256
"""Most writes of one request: each takes the kernel some microseconds."""

MAX_REQUEST: Final = 48 * 1024
"""Longest request, below what a message may have (protocol.MAX_MESSAGE)."""

_CPU_LIST: Final = r"[0-9]{1,4}(?:[-,][0-9]{1,4}){0,4096}"
_CPU_MASK: Final = r"[0-9a-f]{1,8}(?:,[0-9a-f]{8}){0,255}"
_DEVICE: Final = r"[A-Za-z0-9_@-][A-Za-z0-9_.@-]{0,14}"
_READ_BYTES: Final = 32 * 1024
_KERNEL_THREAD: Final = "kernel-thread"
_STAT_BYTES: Final = 4096
_KTHREADD: Final = 2
_PF_KTHREAD: Final = 0x0020_0000
_PF_NO_SETAFFINITY: Final = 0x0400_0000

_IRQBALANCE: Final = "/run/irqbalance"


class TunableFile(NamedTuple):
    """One kind: where its files are, and what names and values look like.

    `{}` stands for each part of the name.
    """

    path: str
    name: str
    value: str


TUNABLE_FILES: Final = {
    "interrupt": TunableFile("/proc/irq/{}/smp_affinity_list", r"[0-9]{1,9}", _CPU_LIST),
    "default-mask": TunableFile("/proc/irq/default_smp_affinity", "", _CPU_MASK),
    "workqueues": TunableFile("/sys/devices/virtual/workqueue/cpumask", "", _CPU_MASK),
    "watchdog": TunableFile("/proc/sys/kernel/watchdog_cpumask", "", _CPU_LIST),
    "rps": TunableFile(
        "/sys/class/net/{}/queues/{}/rps_cpus", f"{_DEVICE}/rx-[0-9]{{1,5}}", _CPU_MASK
    ),
    "xps": TunableFile(
        "/sys/class/net/{}/queues/{}/xps_cpus", f"{_DEVICE}/tx-[0-9]{{1,5}}", _CPU_MASK
    ),
    "idle-limit": TunableFile(
        "/sys/devices/system/cpu/cpu{}/power/pm_qos_resume_latency_us",
        r"[0-9]{1,4}",
        r"n/a|[0-9]{1,9}",
    ),
    "governor": TunableFile(
        "/sys/devices/system/cpu/cpufreq/policy{}/scaling_governor",
        r"[0-9]{1,4}",
        r"[a-z][a-z0-9_]{0,14}",
    ),
    _KERNEL_THREAD: TunableFile("/proc/{}/status", r"[1-9][0-9]{0,9}:[0-9]{1,20}", _CPU_LIST),
}
"""All that can be written, by kind."""


class TunableWrite(NamedTuple):
    """A value to write; `name` is empty for a kind that has only one."""

    kind: str
    name: str
    value: str


class TunableWritten(NamedTuple):
    """What became of it: the errno of the write, and what the file had afterwards."""

    errno: int
    value: str = ""


def parse_writes(data: bytes) -> list[TunableWrite]:
    """Return the writes of a request; ValueError for one that is none of these."""
    lines = data.decode("ascii").split("\n")
    if len(lines) > MAX_WRITES:
        raise ValueError("too many writes")
    writes = []
    for line in lines:
        kind, name, value = line.split(" ")
        known = TUNABLE_FILES.get(kind)
        if known is None or not re.fullmatch(known.name, name):
            raise ValueError("no such tunable")
        if not re.fullmatch(known.value, value):
            raise ValueError("no such value")
        writes.append(TunableWrite(kind, name, value))
    return writes


def render_writes(writes: Iterable[TunableWrite]) -> bytes:
    """Return the request for writes, at most MAX_WRITES."""
    return "\n".join(" ".join(one) for one in writes).encode("ascii")


def batched_writes(writes: Sequence[TunableWrite]) -> Iterator[Sequence[TunableWrite]]:
    """Yield the writes in parts, each short enough for one request."""
    part: list[TunableWrite] = []
    size = 0
    for one in writes:
        length = sum(map(len, one)) + 3
        if part and (size + length > MAX_REQUEST or len(part) == MAX_WRITES):
            yield part
            part, size = [], 0
        part.append(one)
        size += length
    if part:
        yield part


def parse_written(data: bytes) -> list[TunableWritten]:
    """Return the answer to such a request; ValueError for one that is none."""
    answers = (line.partition(" ") for line in data.decode("utf-8", "replace").split("\n"))
    return [TunableWritten(int(errno), value) for errno, _, value in answers]


def render_written(written: Iterable[TunableWritten]) -> bytes:
    """Return the answer to a request for writes."""
    return "\n".join(f"{one.errno} {one.value}" for one in written).encode()


def write_tunables(writes: Sequence[TunableWrite], root: str = "") -> list[TunableWritten]:
    """Write each value and read it back; one that fails does not stop the rest.

    `root` is where the files' tree begins, of tests.
    """
    return [
        move_kernel_thread(one.name, one.value)
        if one.kind == _KERNEL_THREAD
        else _write(root + TUNABLE_FILES[one.kind].path.format(*one.name.split("/")), one)
        for one in writes
    ]


def _write(path: str, one: TunableWrite) -> TunableWritten:
    failed = 0
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(fd, one.value.encode("ascii") + b"\n")
        finally:
            os.close(fd)
    except OSError as error:
        failed = error.errno or EINVAL
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            value = os.read(fd, _READ_BYTES).decode("ascii", "replace").strip()
        finally:
            os.close(fd)
    except OSError as error:
        return TunableWritten(failed or error.errno or EINVAL)
    return TunableWritten(failed, value.replace("\n", " "))


def move_kernel_thread(name: str, cpus: str) -> TunableWritten:
    """Set the affinity of a kernel thread, `tid:start`, and read it back.

    Only of a child of kthreadd that the kernel lets others move (include/linux/sched.h,
    PF_NO_SETAFFINITY): ESRCH where it has ended, EPERM for any other process.
    """
    tid, _, start = name.partition(":")
    try:
        wanted = _numbers(cpus)
        fd = os.open(f"/proc/{tid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check_kernel_thread(fd, start)
            os.sched_setaffinity(int(tid), wanted)
            _check_kernel_thread(fd, start)
        finally:
            os.close(fd)
        with open(f"/proc/{tid}/status", encoding="ascii", errors="replace") as status:
            found = (line.partition(":") for line in status)
            values = {key: value.strip() for key, _, value in found}
        return TunableWritten(0, values.get("Cpus_allowed_list", ""))
    except FileNotFoundError:
        return TunableWritten(ESRCH)
    except (OSError, ValueError) as error:
        return TunableWritten((error.errno if isinstance(error, OSError) else None) or EINVAL)


def _check_kernel_thread(fd: int, start: str) -> None:
    """Raise OSError if a stat file is not that of this kernel thread (proc_pid_stat(5))."""
    fields = os.pread(fd, _STAT_BYTES, 0).rpartition(b")")[2].split()
    if fields[19].decode() != start:
        raise ProcessLookupError(ESRCH, "another thread has its number")
    flags = int(fields[6])
    if int(fields[1]) != _KTHREADD or not flags & _PF_KTHREAD or flags & _PF_NO_SETAFFINITY:
        raise PermissionError(EPERM, "not a kernel thread that may be moved")


def _numbers(cpus: str) -> set[int]:
    """Return the CPUs of a list; ValueError for one with a range of no sense."""
    found: set[int] = set()
    for part in cpus.split(","):
        first, dash, last = part.partition("-")
        found |= set(range(int(first), int(last if dash else first) + 1))
    return found


def ask_irqbalance(pid: int, banned: str | None, folder: str = _IRQBALANCE) -> socket.socket:
    """Return a connection to irqbalance over which one request was sent; raises OSError.

    `banned` is the list of CPUs that it should keep clear, an empty one for those that its own
    configuration names; None asks for its setup, and the answer can be read. Nothing here waits.
    It takes requests of root only (irqbalance.c, sock_handle): uid 0 in the credentials, which
    needs CAP_SETUID of a broker that is not root.
    """
    if banned is None:
        request = b"setup"
    elif not banned or re.fullmatch(_CPU_LIST, banned):
        request = b"settings cpus " + (banned.encode("ascii") or b"NULL")
    else:
        raise ValueError("no list of CPUs")
    status = os.stat(folder, follow_symlinks=False)
    if status.st_uid or status.st_mode & 0o022:
        raise OSError(EACCES, "its folder is not root's alone")
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    end = socket.socket(socket.AF_UNIX, kind)
    try:
        end.connect(f"{folder}/irqbalance{pid}.sock")
        credentials = struct.pack("=iII", os.getpid(), 0, os.getgid())
        end.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)])
    except BaseException:
        end.close()
        raise
    return end
