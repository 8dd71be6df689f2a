"""Texts of /proc and /sys: a thread's stat, cgroups, system call, descriptors; numbers, masks."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from kata_pin.base.cpuset import MAX_CPU, CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.base.values import ThreadRole
from kata_pin.linux.kernel_text import clipped

# A process chooses its threads' names, so `stat` is cut at the last closing bracket
# (proc_pid_stat(5)), and names are decoded so that they can always be encoded again. parse_stat is
# the hot path: no check there may cost more than the split.

KVM_RUN: Final = 0xAE80  # ioctl request that runs a vCPU (linux/kvm.h: _IO(KVMIO, 0x80))

IOCTL_NUMBERS: Final = {"x86_64": 16, "aarch64": 29, "riscv64": 29, "s390x": 54, "ppc64le": 54}
"""Number of the ioctl system call by machine (uname -m)."""

MAX_STAT: Final = 4096
MAX_CGROUP: Final = 256 * 1024
MAX_CMDLINE: Final = 128 * 1024  # longest texts accepted; linux/process.py cuts a longer cmdline

_SCOPES: Final = {"cri-containerd", "crio", "docker", "kata", "libpod", "nerdctl"}
"""The prefixes before the id in the names of systemd scopes, by container manager."""

_VCPU_LINK: Final = re.compile(r"anon_inode:kvm-vcpu:([0-9]{1,5})\Z")
_WORKER: Final = re.compile(r"(vhost-|kvm-pit/|kvm-nx-lpage-recovery-)([0-9]{1,10})\Z")
_WORD: Final = re.compile(r"-?[0-9]{1,20}\Z|0x[0-9a-f]{1,16}\Z")


class Stat(NamedTuple):
    """The fields of proc_pid_stat(5) that kata-pin uses; times in clock ticks.

    `starttime` is since boot, `processor` the pCPU it last ran on.
    """

    pid: int
    comm: str
    state: str
    ppid: int
    flags: int
    utime: int
    stime: int
    starttime: int
    processor: int


def parse_stat(data: bytes) -> Stat:
    """Read /proc/<pid>/stat or /proc/<pid>/task/<tid>/stat; ParseError if it is cut short."""
    if len(data) > MAX_STAT:
        raise ParseError(f"longer than {MAX_STAT} bytes", source="stat")
    head, bracket, tail = data.rpartition(b") ")
    number, opening, comm = head.partition(b" (")
    if not (bracket and opening):
        raise ParseError("no name in brackets", source="stat", text=_decode(data))
    # Index 0 is field 3 of proc_pid_stat(5), the state.
    field = tail.split(None, 37)
    try:
        return Stat(
            int(number),
            _name(comm),
            _decode(field[0]),
            int(field[1]),
            _flags(field[6]),
            int(field[11]),
            int(field[12]),
            int(field[19]),
            int(field[36]),
        )
    except (ValueError, IndexError):
        raise ParseError("too few or wrong fields", source="stat", text=_decode(data)) from None


_flags = lru_cache(maxsize=256)(int)
"""Reads task flags; equal ones are one object, which thousands of threads have."""


class Syscall(NamedTuple):
    """The system call that a thread sleeps in (proc_pid_syscall(5)); number -1: none."""

    number: int
    args: tuple[int, ...]

    def kvm_run_fd(self, machine: str = "x86_64") -> int | None:
        """Return the descriptor of ioctl(fd, KVM_RUN), None for another call.

        Kernel workers in the VMM's process (vhost, KVM's huge page recovery) show the call that
        created them, so leave out tasks with PF_USER_WORKER.
        """
        if self.number != IOCTL_NUMBERS.get(machine) or len(self.args) < 2:
            return None
        return self.args[0] if self.args[1] == KVM_RUN else None


def parse_syscall(data: bytes) -> Syscall | None:
    """Read /proc/<pid>/task/<tid>/syscall; None while the thread is `running`."""
    if len(data) > MAX_STAT:
        raise ParseError(f"longer than {MAX_STAT} bytes", source="syscall")
    words = _decode(data).split()
    if words == ["running"]:
        return None
    if not words or not all(_WORD.match(word) for word in words):
        raise ParseError("invalid system call", source="syscall", text=_decode(data))
    number, *args = (int(word, 0 if word.startswith("0x") else 10) for word in words)
    return Syscall(number, tuple(args))


class CgroupEntry(NamedTuple):
    """One hierarchy that a task is in (cgroups(7), /proc/<pid>/cgroup).

    `controllers` is empty for cgroup v2; `removed` is whether the cgroup has been removed.
    """

    hierarchy: int
    controllers: tuple[str, ...]
    path: str
    removed: bool = False


class Cgroups(NamedTuple):
    """All hierarchies that a task is in."""

    entries: tuple[CgroupEntry, ...]

    @property
    def unified(self) -> CgroupEntry | None:
        """The entry of cgroup v2, None on a node with v1 only."""
        return next((e for e in self.entries if e.hierarchy == 0 and not e.controllers), None)

    @property
    def cpuset(self) -> CgroupEntry | None:
        """The entry of the cpuset controller."""
        return self.of("cpuset")

    def of(self, controller: str) -> CgroupEntry | None:
        """Return the entry of a controller: v1's if it is mounted there, else v2's."""
        return next((e for e in self.entries if controller in e.controllers), self.unified)

    @property
    def paths(self) -> tuple[str, ...]:
        """The distinct paths, in file order."""
        return tuple(dict.fromkeys(entry.path for entry in self.entries))

    def names(self, sandbox_id: str) -> bool:
        """Return whether some path has an element that names the sandbox.

        That is the id itself, Kata's `kata_<id>`, the name in `slice:prefix:name` (which cgroupfs
        takes literally), or a systemd scope `<runtime>-<id>.scope`. An id inside a longer word
        belongs to another container.
        """
        return bool(self.naming(sandbox_id))

    def naming(self, sandbox_id: str) -> tuple[CgroupEntry, ...]:
        """Return the entries whose path has such an element."""
        return tuple(
            entry
            for entry in self.entries
            if sandbox_id
            and any(_element_names(element, sandbox_id) for element in entry.path.split("/"))
        )


def _element_names(element: str, sandbox_id: str) -> bool:
    if element.endswith(f"-{sandbox_id}.scope"):
        return element.removesuffix(f"-{sandbox_id}.scope") in _SCOPES
    return element.rpartition(":")[2].removeprefix("kata_") == sandbox_id


def parse_cgroup(data: bytes) -> Cgroups:
    """Read /proc/<pid>/cgroup of v1, v2 or both; a path may hold colons and spaces."""
    if len(data) > MAX_CGROUP:
        raise ParseError(f"longer than {MAX_CGROUP} bytes", source="cgroup")
    return Cgroups(tuple(_cgroup_entry(line) for line in _decode(data).split("\n") if line))


@lru_cache(maxsize=16)
def _cgroup_entry(line: str) -> CgroupEntry:
    """Read a line: all but one or two are the same for most processes of a node."""
    parts = line.split(":", 2)
    number = parts[0]
    if len(parts) != 3 or not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise ParseError("not hierarchy:controllers:path", source="cgroup", text=line)
    path = parts[2].removesuffix(" (deleted)")
    if not path.startswith("/"):
        raise ParseError("path does not start with a slash", source="cgroup", text=line)
    controllers = tuple(parts[1].split(",")) if parts[1] else ()
    return CgroupEntry(int(number), controllers, path, removed=path != parts[2])


def parse_cmdline(data: bytes) -> tuple[str, ...]:
    """Read /proc/<pid>/cmdline; empty for a kernel thread or a zombie.

    The process can rewrite this text. Longer than MAX_CMDLINE: ParseError.
    """
    if len(data) > MAX_CMDLINE:
        raise ParseError(f"longer than {MAX_CMDLINE} bytes", source="cmdline")
    if not data:
        return ()
    return tuple(_decode(data).removesuffix("\0").split("\0"))


class ExeFile(NamedTuple):
    """The file that a process executes, by the kernel's link to it (proc_pid_exe(5)).

    `path` is where it was opened, in the process's own mounts; `deleted` whether it has been
    removed or replaced since. The rest is stat(2)'s and cannot be chosen by the process.
    """

    path: str
    deleted: bool
    device: int
    inode: int
    uid: int
    mode: int


DELETED: Final = " (deleted)"
"""What the kernel appends to the path of a file that was unlinked or replaced."""


def parse_exe(data: bytes) -> ExeFile:
    """Read what Calls.read_slow returns for /proc/<pid>/exe; ParseError for anything else.

    That is `<dev> <ino> <uid> <mode, octal>`, a newline, and the link's target.
    """
    head, newline, target = data.partition(b"\n")
    words = head.split(b" ")
    if not newline or len(words) != 4 or not all(len(w) <= 20 and w.isdigit() for w in words):
        raise ParseError("not device, inode, uid and mode", source="exe", text=_decode(data))
    try:
        device, inode, uid, mode = *map(int, words[:3]), int(words[3], 8)
    except ValueError:
        raise ParseError("mode is not octal", source="exe", text=_decode(data)) from None
    path = _decode(target)
    gone = path.endswith(DELETED)
    return ExeFile(path.removesuffix(DELETED), gone, device, inode, uid, mode)


def vcpu_of_link(target: str) -> int | None:
    """Return N for a descriptor link `anon_inode:kvm-vcpu:N`, None for any other.

    N is KVM's vCPU id, on x86 the APIC id. `kvm-vcpu-stats:N` is another kind of descriptor.
    """
    match = _VCPU_LINK.match(target)
    return None if match is None else int(match[1])


class KernelWorker(NamedTuple):
    """What a kernel worker's name means: what it is for, and the thread it was made for."""

    role: ThreadRole
    owner: int


def kernel_worker(comm: str) -> KernelWorker | None:
    """Return what the name of a kernel thread or of a user worker means, None for any other name.

    vhost-<tid> is named after the thread that called VHOST_SET_OWNER (drivers/vhost/vhost.c),
    kvm-nx-lpage-recovery-<tid> after the one that made the VM, kvm-pit/<pid> after its process. A
    process can take such a name, so check the task's flags.
    """
    match = _WORKER.match(comm)
    if match is None:
        return None
    role = ThreadRole.VHOST if match[1] == "vhost-" else ThreadRole.KVM
    return KernelWorker(role, int(match[2]))


def status_field(data: bytes, name: str) -> str | None:
    """Return one field of /proc/<pid>/status, None if absent; newlines in Name are escaped."""
    key = f"{name}:".encode()
    for line in data.split(b"\n"):
        if line.startswith(key):
            return _decode(line[len(key) :]).strip()
    return None


@lru_cache(maxsize=256)
def _name(comm: bytes) -> str:
    """Return a thread's name: the same object for the thousands that share it."""
    return _decode(comm)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


# Numbers in the kernel's text: decimal, not negative, of at most 20 digits.

_NUMBERS: Final = re.compile(rb"[0-9]{1,20}(?:[ \t]+[0-9]{1,20})*\Z")


def numbers(data: bytes, source: str) -> list[int]:
    """Return the numbers of a line, which has nothing else; raises ParseError."""
    line = data.strip(b" \t\n")
    if not _NUMBERS.match(line):
        raise ParseError("not a line of numbers", source=source, text=clipped(line))
    return [int(word) for word in line.split()]


# The kernel's hexadecimal CPU masks: groups of eight digits, the highest CPUs first.
#
# Format: lib/bitmap-str.c, bitmap_parse and `%*pb`. CpuSet.hex_mask writes them.

MAX_BYTES: Final = (MAX_CPU + 1) // 4 * 9 // 8 + 2

_MASK: Final = re.compile(rb"[0-9a-fA-F]{1,8}(?:,[0-9a-fA-F]{1,8})*\Z")


def parse_mask(data: bytes, source: str) -> CpuSet:
    """Return the CPUs of a mask such as `00000001,0000000f`; raises ParseError."""
    text = data.strip()
    if len(data) > MAX_BYTES or not _MASK.match(text):
        raise ParseError("not a mask of CPUs", source=source, text=clipped(text))
    bits = 0
    for group in text.split(b","):
        bits = bits << 32 | int(group, 16)
    return CpuSet.from_bits(bits)
