"""What the kernel counts of CPUs and of a VM; what it counts of threads is in task_counters.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from errno import ENOENT, EPERM
from typing import Final, TypeVar

from kata_pin.base.counters import CpuRun, CpuSample, CpuTimes, KvmCounts, Scheduling
from kata_pin.base.errors import HostError, ParseError
from kata_pin.linux.files import HostRoot, read_bytes, read_once
from kata_pin.linux.interrupts import MAX_TEXT, parse_interrupts, parse_softirqs
from kata_pin.linux.kernel_text import check_size, clipped
from kata_pin.linux.proc import numbers
from kata_pin.rights.broker.files import names_in

# What the scheduler counts of CPUs: /proc/stat, /proc/schedstat.
#
# Facts are in Documentation/scheduler/sched-stats.rst, proc_stat(5).

MAX_CPUS: Final = 4 * 1024 * 1024
"""Most bytes of a text about all CPUs: 8,192 CPUs with their domains."""

VERSIONS: Final = range(15, 18)
"""Versions of /proc/schedstat whose lines of CPUs are known: Linux 2.6.39 to 6.18."""


def parse_scheduling(data: bytes) -> Scheduling:
    """Read the scheduling class of a stat file, and when the thread started; raises ParseError."""
    words = data[data.rfind(b") ") + 2 :].split(None, 39)
    wanted = (words[38], words[37], words[19]) if len(words) > 38 else ()
    if not wanted or not all(one.isdigit() and len(one) <= 20 for one in wanted):
        raise ParseError("no scheduling class", source="stat", text=clipped(data))
    return Scheduling(*map(int, wanted))


def parse_cpu_runs(data: bytes, cpus: Collection[int]) -> dict[int, CpuRun]:
    """Read /proc/schedstat of these CPUs; an offline one is left out.

    Raises ParseError, also for a version that is not known: a number there may mean anything.
    """
    check_size(data, MAX_CPUS, "/proc/schedstat")
    head, _, rest = data.partition(b"\n")
    word, _, version = head.partition(b" ")
    if word != b"version" or not version.isdigit() or len(version) > 4:
        raise ParseError("no version", source="/proc/schedstat", text=clipped(head))
    if int(version) not in VERSIONS:
        raise ParseError(f"unknown version {int(version)}", source="/proc/schedstat")
    found = {}
    for cpu, line in _cpu_lines(rest, cpus):
        values = numbers(line, "/proc/schedstat")
        if len(values) != 9:
            raise ParseError("not nine numbers", source="/proc/schedstat", text=clipped(line))
        found[cpu] = CpuRun(*values[6:9])
    return found


def parse_cpu_times(data: bytes, cpus: Collection[int]) -> dict[int, CpuTimes]:
    """Read /proc/stat of these CPUs; an offline one is left out. Raises ParseError."""
    check_size(data, MAX_CPUS, "/proc/stat")
    found = {}
    for cpu, line in _cpu_lines(data, cpus):
        values = numbers(line, "/proc/stat")
        if len(values) < 8:
            raise ParseError("not eight numbers", source="/proc/stat", text=clipped(line))
        found[cpu] = CpuTimes(values[3] + values[4], values[5] + values[6], values[7])
    return found


def _cpu_lines(data: bytes, cpus: Collection[int]) -> list[tuple[int, bytes]]:
    """Return the lines that begin with `cpuN`, without that; the last counts if there are two."""
    found = []
    for line in data.split(b"\n"):
        if line.startswith(b"cpu"):
            number, _, rest = line[3:].partition(b" ")
            if number.isdigit() and len(number) <= 6 and int(number) in cpus:
                found.append((int(number), rest))
    return found


# The running counters of threads: how long each ran and waited, how often it was moved.


_KVM_FILES: Final = (
    *("exits", "halt_exits", "halt_poll_success_ns", "halt_poll_fail_ns", "halt_wait_ns"),
)
"""Of each VM in debugfs, in the order of KvmCounts (virt/kvm/kvm_main.c)."""

MAX_VMS: Final = 4096


def kvm_counts(root: HostRoot, pid: int) -> KvmCounts:
    """Return what KVM counted of the VM that a process made; raises HostError where it cannot."""
    folder = root.debug("kvm")
    try:
        names = sorted(names_in(folder, MAX_VMS))
        vm = next((name for name in names if name.partition("-")[0] == str(pid)), "")
        if not vm:
            raise HostError("find", f"a VM of process {pid} in {folder}")
        return KvmCounts(*(int(read_once(root.debug("kvm", vm, name))) for name in _KVM_FILES))
    except ValueError as error:
        raise HostError("read", f"KVM's counters in {folder}", hint=str(error)) from error
    except OSError as error:
        hint = "run as root, with debugfs mounted"
        if error.errno == EPERM:
            hint = "a kernel that is locked down (Secure Boot) keeps them to itself"
        raise HostError(
            "read", f"KVM's counters in {folder}", error.errno or 0, hint=hint
        ) from error


# What CPUs did: /proc/stat, /proc/schedstat, /proc/interrupts, /proc/softirqs.

Value = TypeVar("Value")

_ABSENT: Final = {
    "schedstat": "this kernel has no /proc/schedstat (CONFIG_SCHEDSTATS)",
}


def cpu_samples(
    root: HostRoot, cpus: Collection[int], problems: dict[str, str], *, irq: bool = True
) -> dict[int, CpuSample]:
    """Return what each of these CPUs did since boot; without `irq` not which interrupts it had.

    What cannot be read is None; `problems` then has by file why.
    """

    def read(name: str, limit: int, parse: _Parser[Value]) -> Mapping[int, Value]:
        try:
            return parse(read_bytes(root.proc(name), limit), cpus)
        except OSError as error:
            absent = _ABSENT.get(name) if error.errno == ENOENT else None
            problems[name] = absent or f"cannot read /proc/{name}: {error.strerror}"
        except ParseError as error:
            problems[name] = error.message
        return {}

    if not cpus:
        return {}
    runs = read("schedstat", MAX_CPUS, parse_cpu_runs)
    times = read("stat", MAX_CPUS, parse_cpu_times)
    interrupts = read("interrupts", MAX_TEXT, parse_interrupts) if irq else {}
    softirqs = read("softirqs", MAX_TEXT, parse_softirqs) if irq else {}
    return {
        cpu: CpuSample(times.get(cpu), runs.get(cpu), interrupts.get(cpu), softirqs.get(cpu))
        for cpu in cpus
    }


_Parser = Callable[[bytes, Collection[int]], Mapping[int, Value]]
