"""Files of the kernel that the broker writes for the daemon (docs/broker.md).

These are tunables and groups of resctrl; irqbalance is asked over its socket.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from errno import EACCES, EINVAL, EPERM, ESRCH
from typing import Final, NamedTuple

from kata_pin.rights.broker.protocol import AffinityChange, Changed, numbers_in
from kata_pin.rights.broker.threads import change_threads, stat_fields

# Files of the kernel that the daemon has written, and irqbalance's socket (docs/broker.md).
#
# A request names a kind and which one of it, such as an interrupt's number; the path is made here,
# so none comes from outside. What a name and a value may look like is checked, what the value means
# is the kernel's business.

MAX_WRITES: Final = 256
"""Most writes of one request: each takes the kernel some microseconds."""

MAX_REQUEST: Final = 48 * 1024
"""Longest request, below what a message may have (protocol.MAX_MESSAGE)."""

CPU_LIST: Final = r"[0-9]{1,4}(?:[-,][0-9]{1,4}){0,4096}"
CPU_MASK: Final = r"[0-9a-f]{1,8}(?:,[0-9a-f]{8}){0,255}"
_DEVICE: Final = r"[A-Za-z0-9_@-][A-Za-z0-9_.@-]{0,14}"
_READ_BYTES: Final = 32 * 1024
_KTHREADD: Final = 2
_PF_KTHREAD: Final = 0x0020_0000
_PF_NO_SETAFFINITY: Final = 0x0400_0000

_IRQBALANCE: Final = "/run/irqbalance"


class TunableKind(StrEnum):
    """What is changed. Values are CPU lists, unless said otherwise."""

    INTERRUPT = "interrupt"  # the mask of one; its name is the number
    DEFAULT_MASK = "default-mask"  # of interrupts that are yet to be set up
    IRQBALANCE = "irqbalance"  # the pCPUs it keeps clear; its name is the pid
    WORKQUEUES = "workqueues"  # where unbound work of the kernel runs
    WATCHDOG = "watchdog"  # the pCPUs that the lockup detectors watch
    KERNEL_THREAD = "kernel-thread"  # an affinity; its name is `tid:start`
    RPS = "rps"  # who handles packets of a queue, or `none`; its name is `device/queue`
    XPS = "xps"  # the same of a queue that sends
    IDLE_LIMIT = "idle-limit"  # microseconds, or `n/a`; its name is the pCPU
    GOVERNOR = "governor"  # a word; its name is the frequency policy's number


OF_INTERRUPTS: Final = frozenset({TunableKind.INTERRUPT, TunableKind.DEFAULT_MASK})
"""What `quiet: irq` has; `full` has all kinds."""


class TunableFile(NamedTuple):
    """One kind: where its files are, and what names and values look like.

    `{}` stands for each part of the name.
    """

    path: str
    name: str
    value: str


TUNABLE_FILES: Final[Mapping[str, TunableFile]] = {
    TunableKind.INTERRUPT: TunableFile("/proc/irq/{}/smp_affinity_list", r"[0-9]{1,9}", CPU_LIST),
    TunableKind.DEFAULT_MASK: TunableFile("/proc/irq/default_smp_affinity", "", CPU_MASK),
    TunableKind.WORKQUEUES: TunableFile("/sys/devices/virtual/workqueue/cpumask", "", CPU_MASK),
    TunableKind.WATCHDOG: TunableFile("/proc/sys/kernel/watchdog_cpumask", "", CPU_LIST),
    TunableKind.RPS: TunableFile(
        "/sys/class/net/{}/queues/{}/rps_cpus", f"{_DEVICE}/rx-[0-9]{{1,5}}", CPU_MASK
    ),
    TunableKind.XPS: TunableFile(
        "/sys/class/net/{}/queues/{}/xps_cpus", f"{_DEVICE}/tx-[0-9]{{1,5}}", CPU_MASK
    ),
    TunableKind.IDLE_LIMIT: TunableFile(
        "/sys/devices/system/cpu/cpu{}/power/pm_qos_resume_latency_us",
        r"[0-9]{1,4}",
        r"n/a|[0-9]{1,9}",
    ),
    TunableKind.GOVERNOR: TunableFile(
        "/sys/devices/system/cpu/cpufreq/policy{}/scaling_governor",
        r"[0-9]{1,4}",
        r"[a-z][a-z0-9_]{0,14}",
    ),
    TunableKind.KERNEL_THREAD: TunableFile(
        "/proc/{}/status", r"[1-9][0-9]{0,9}:[0-9]{1,20}", CPU_LIST
    ),
}
"""All that can be written as files, by kind; irqbalance is asked over its socket."""


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
        write = TunableWrite(kind, name, value)
        if not _is_known(write):
            raise ValueError("no such tunable, or no value of it")
        writes.append(write)
    return writes


def check_level(writes: Iterable[TunableWrite], level: str) -> None:
    """Raise OSError for a kind that the setting `quiet` does not have at this level."""
    if level != "full" and not {write.kind for write in writes} <= OF_INTERRUPTS:
        raise OSError(EACCES, "needs `quiet: full`")


def _is_known(write: TunableWrite) -> bool:
    """Whether there is such a kind, and name and value look as those of it do."""
    known = TUNABLE_FILES.get(write.kind)
    return (
        known is not None
        and re.fullmatch(known.name, write.name) is not None
        and re.fullmatch(known.value, write.value) is not None
    )


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


def write_tunables(writes: Sequence[TunableWrite], root: str = "") -> list[TunableWritten]:
    """Write each value and read it back; one that fails does not stop the rest.

    Without a broker nobody else checks them: names and values come from the registry, which
    belongs to the daemon's user. `root` is where the files' tree begins, of tests.
    """
    return [_written(one, root) for one in writes]


def _written(one: TunableWrite, root: str) -> TunableWritten:
    if not _is_known(one):
        return TunableWritten(EINVAL)
    if one.kind == TunableKind.KERNEL_THREAD:
        return move_kernel_thread(one.name, one.value)
    return _write(root + TUNABLE_FILES[one.kind].path.format(*one.name.split("/")), one)


def _write(path: str, one: TunableWrite) -> TunableWritten:
    failed = 0
    try:
        _put(path, f"{one.value}\n")
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


def _put(path: str, text: str) -> None:
    """Write a file in one call; OSError for a link."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)


def move_kernel_thread(name: str, cpus: str) -> TunableWritten:
    """Set the affinity of a kernel thread, `tid:start`, and read it back.

    Only of a child of kthreadd that the kernel lets others move (include/linux/sched.h,
    PF_NO_SETAFFINITY): ESRCH where it has ended, EPERM for any other process.
    """
    tid, _, start = name.partition(":")
    try:
        wanted = numbers_in(cpus)
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
    fields = stat_fields(fd)
    if fields[19].decode() != start:
        raise ProcessLookupError(ESRCH, "another thread has its number")
    flags = int(fields[6])
    if int(fields[1]) != _KTHREADD or not flags & _PF_KTHREAD or flags & _PF_NO_SETAFFINITY:
        raise PermissionError(EPERM, "not a kernel thread that may be moved")


def ask_irqbalance(pid: int, banned: str | None) -> socket.socket:
    """Return a connection to irqbalance over which one request was sent; raises OSError.

    `banned` is the list of CPUs that it should keep clear, an empty one for those that its own
    configuration names; None asks for its setup, and the answer can be read. Nothing here waits.
    It takes requests of root only (irqbalance.c, sock_handle): uid 0 in the credentials, which
    needs CAP_SETUID of a broker that is not root.
    """
    if banned is None:
        request = b"setup"
    elif not banned or re.fullmatch(CPU_LIST, banned):
        request = b"settings cpus " + (banned.encode("ascii") or b"NULL")
    else:
        raise ValueError("no list of CPUs")
    status = os.stat(_IRQBALANCE, follow_symlinks=False)
    if status.st_uid or status.st_mode & 0o022:
        raise OSError(EACCES, "its folder is not root's alone")
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    end = socket.socket(socket.AF_UNIX, kind)
    try:
        end.connect(f"{_IRQBALANCE}/irqbalance{pid}.sock")
        credentials = struct.pack("=iII", os.getpid(), 0, os.getgid())
        end.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)])
    except BaseException:
        end.close()
        raise
    return end


# Groups of resctrl: one per sandbox, to count what its threads use, in one per class.
#
# Only groups of our own prefix below /sys/fs/resctrl are made, joined or removed, and a class is
# one that the first message names with its schemata. Facts are in
# Documentation/filesystems/resctrl.rst. A thread can join a monitoring group only from its control
# group; a thread is taken only from root, or from the thread's owner
# (rdtgroup_task_write_permission).

ROOT: Final = "/sys/fs/resctrl"
PREFIX: Final = "kata-pin-"

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\Z")
_MONITORING: Final = "mon_groups"


class KernelFiles:
    """What is done to resctrl's files; each raises OSError."""

    def mkdir(self, path: str) -> None:
        """Make a group."""
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        """Remove a group; its threads go back to the one around it."""
        os.rmdir(path)

    def write(self, path: str, text: str) -> None:
        """Write in one call."""
        _put(path, text)


class ResctrlGroups:
    """Makes, fills and removes groups; `classes` has the schemata of each by its name."""

    def __init__(
        self,
        classes: Mapping[str, str],
        root: str = ROOT,
        files: KernelFiles | None = None,
        proc: str = "/proc",
    ) -> None:
        self._classes = classes
        self._root = root
        self._proc = proc
        self._files = files or KernelFiles()
        self._configured: set[str] = set()
        """Classes whose schemata were written by this process: others may be of older settings."""

    def make(self, class_name: str, name: str) -> None:
        """Make the group of a sandbox, and its class's first; one that is there is good too.

        OSError as the kernel has it: ENOSPC without a free monitor or class, EBUSY while monitors
        of removed groups still count down, EINVAL for schemata that it refuses.
        """
        if class_name and class_name not in self._configured:
            self._make_class(class_name)
        with suppress(FileExistsError):
            self._files.mkdir(self._group(class_name, name))

    def join(self, class_name: str, name: str, threads: Sequence[AffinityChange]) -> list[Changed]:
        """Have threads join a group, each identified as for affinities; one errno per thread."""
        group, control = self._group(class_name, name), self._control(class_name)

        def move(tid: int, _: object) -> None:
            try:
                self._files.write(f"{group}/tasks", f"{tid}\n")
            except OSError as error:
                if error.errno != EINVAL or not class_name:
                    raise  # somebody else's control group: it is left there
                self._files.write(f"{control}/tasks", f"{tid}\n")
                self._files.write(f"{group}/tasks", f"{tid}\n")

        return change_threads(threads, self._proc, move, lambda _: ())

    def remove(self, class_name: str, name: str) -> None:
        """Remove the group of a sandbox, or without `name` that of a class; OSError otherwise."""
        if not class_name and not name:
            raise OSError(EINVAL, "no group of ours")
        path = self._group(class_name, name) if name else self._control(class_name)
        with suppress(FileNotFoundError):
            self._files.rmdir(path)
        if not name:
            self._configured.discard(class_name)

    def _make_class(self, class_name: str) -> None:
        schemata = self._classes.get(class_name)
        if schemata is None:
            raise OSError(EACCES, "no class of the first message")
        control, is_new = self._control(class_name), True
        try:
            self._files.mkdir(control)
        except FileExistsError:
            is_new = False
        try:
            for line in schemata.split():
                self._files.write(f"{control}/schemata", f"{line}\n")
        except OSError:
            if is_new:
                self._files.rmdir(control)
            raise
        self._configured.add(class_name)

    def _control(self, class_name: str) -> str:
        return f"{self._root}/{PREFIX}{_checked(class_name)}" if class_name else self._root

    def _group(self, class_name: str, name: str) -> str:
        return f"{self._control(class_name)}/{_MONITORING}/{PREFIX}{_checked(name)}"


def _checked(name: str) -> str:
    if _NAME.match(name) is None:
        raise OSError(EINVAL, "not the name of a group")
    return name
