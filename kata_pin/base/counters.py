"""What was measured of tasks, CPUs, cgroups, caches and memory.

These are the kernel's running counters, the rates between two readings, and windows of pCPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct, field

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.sandbox import PF_KTHREAD
from kata_pin.base.threads import TaskRun, TaskSample, ThreadKey
from kata_pin.base.values import Method, TracedKind

# The kernel's running counters of tasks, CPUs and cgroups. All grow from birth or boot.

TICK_NS: Final = 10_000_000
"""Resolution of /proc/stat: USER_HZ is 100 on every Linux that Kata runs on."""


class CpuRun(NamedTuple):
    """How long all tasks of a CPU ran and waited, and in how many slices; the idle task is none.

    The times grow when a task leaves the CPU: of one that never leaves they are late.
    """

    ran_ns: int
    waited_ns: int
    slices: int


class CpuTimes(NamedTuple):
    """Times of a CPU in clock ticks: idle, in interrupts, and taken by a hypervisor.

    Time in interrupts is part of what threads ran, too, on kernels without
    CONFIG_IRQ_TIME_ACCOUNTING.
    """

    idle: int
    interrupts: int
    steal: int


class InterruptKind(StrEnum):
    """What an interrupt is for."""

    TICK = "tick"
    RESCHEDULE = "reschedule"
    CALL = "call"
    DEVICE = "device"
    GUEST = "guest"
    OTHER = "other"


Counts = Mapping[InterruptKind, int]
"""Interrupts of one CPU."""


class Throttling(NamedTuple):
    """How often a cgroup was stopped by its CPU quota, and how long in all."""

    times: int
    ns: int


# A thread's scheduling class, and what the node says of real-time ones.

OTHER: Final = 0
FIFO: Final = 1
RR: Final = 2
BATCH: Final = 3
IDLE: Final = 5
"""Policies of sched(7) (linux/sched.h), without those that need more than a priority."""

_WORDS: Final = {OTHER: "other", FIFO: "fifo", RR: "rr", BATCH: "batch", IDLE: "idle"}


class Scheduling(NamedTuple):
    """A policy, its real-time priority (0: none), and when the thread started (stat field 22)."""

    policy: int
    priority: int
    starttime: int = 0

    @property
    def is_realtime(self) -> bool:
        """Whether nothing of the ordinary class runs while this thread wants to."""
        return self.policy in {FIFO, RR}

    @property
    def text(self) -> str:
        """Return it as a setting has it, such as `fifo:1`."""
        word = _WORDS.get(self.policy, f"policy {self.policy}")
        return f"{word}:{self.priority}" if self.is_realtime else word


class RtNode(Struct, frozen=True):
    """What the node says; None: unknown.

    `runtime_us` of every `period_us` are left to real-time threads (-1: all). `fair_server`: the
    kernel has one (Linux 6.12); `unserved` are pCPUs on which it is switched off. `guards` has by
    pCPU the real-time priorities of its kernel threads by name, 0 for those of another class.
    """

    runtime_us: int | None = None
    period_us: int | None = None
    fair_server: bool = False
    unserved: frozenset[int] = frozenset()
    guards: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


# What the threads of one sandbox use of caches and memory bandwidth, as resctrl counts it.


class CacheUse(NamedTuple):
    """Sums over the node's L3 caches, in bytes; None: not counted by this hardware, or not now.

    `occupancy` is now, the others grow with what was transferred: all of it, and from the cache's
    own NUMA node. `at_ns` is when it was read (CLOCK_MONOTONIC).
    """

    at_ns: int
    occupancy: int | None = None
    total: int | None = None
    local: int | None = None


class BandwidthRates(NamedTuple):
    """Bytes per second between two readings; None: unknown."""

    total: float | None = None
    local: float | None = None


def rates_between(before: CacheUse | None, after: CacheUse | None) -> BandwidthRates:
    """Return the bandwidth between two readings of one group."""
    if before is None or after is None or after.at_ns <= before.at_ns:
        return BandwidthRates()
    seconds = (after.at_ns - before.at_ns) / 1e9

    def rate(old: int | None, new: int | None) -> float | None:
        # a counter that runs backwards belongs to a group that was made anew
        return None if old is None or new is None or new < old else (new - old) / seconds

    return BandwidthRates(rate(before.total, after.total), rate(before.local, after.local))


# The kernel's counters at one moment, and the rates between two of them.


class CpuSample(NamedTuple):
    """One CPU. None: the file could not be read, or the CPU is offline."""

    times: CpuTimes | None
    run: CpuRun | None
    interrupts: Counts | None
    softirqs: Mapping[str, int] | None


class Sample(Struct, frozen=True):
    """What was read at once.

    The CPUs were read between `cpus_from_ns` and `cpus_until_ns`. `tasks_after` are some of the
    threads read again after that: between their two readings lies the CPUs'. `caches` are
    by sandbox id. `problems` has by file why it could not be read.
    """

    at_ns: int
    tasks: Mapping[ThreadKey, TaskSample]
    cpus_from_ns: int = 0
    cpus_until_ns: int = 0
    cpus: Mapping[int, CpuSample] = field(default_factory=dict)
    tasks_after: Mapping[ThreadKey, TaskRun] = field(default_factory=dict)
    throttled: Mapping[ThreadKey, Throttling] = field(default_factory=dict)
    caches: Mapping[str, CacheUse] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)


class TaskRates(NamedTuple):
    """A thread between two samples; per cent of one CPU, events per second. None: unknown.

    `starving`: it got no CPU although it was ready all the time.
    """

    cpu_percent: float
    wait_percent: float
    preemptions: float | None
    migrations: float | None
    last_cpu: int | None
    starving: bool = False


class CpuRates(NamedTuple):
    """An exclusive CPU between two samples; per cent, events per second. None: unknown.

    `foreign_percent` and `foreign_switches` are what is certain: at least so much.
    """

    own_percent: float | None
    foreign_percent: float | None
    foreign_switches: float | None
    steal_percent: float | None
    interrupts: Mapping[str, float] | None
    softirqs: Mapping[str, float] | None


# Where the memory of a sandbox is, and which of its VMM's mappings hold it.


class NodeBytes(NamedTuple):
    """Bytes on one NUMA node; `huge` is the part in huge pages."""

    total: int
    huge: int


class Placed(NamedTuple):
    """One line of numa_maps: a mapping's start, its policy, its pages by node, and their size.

    `policy` is as the kernel writes it, such as `default` or `bind:1`; it has no blanks. `file` is
    the start of the path that is mapped, empty for anonymous memory. `huge`: of hugetlbfs.
    """

    start: int
    policy: str
    pages: Mapping[int, int]
    page_size: int
    file: str = ""
    huge: bool = False


class Extent(NamedTuple):
    """One line of maps: from where to where a mapping goes, and whether it is shared."""

    start: int
    end: int
    shared: bool


class FreeMemory(NamedTuple):
    """Memory of a NUMA node in bytes: all of it, what can be had, and free huge pages by size.

    `available` is free or clean and unused in the page cache.
    """

    total: int
    available: int
    huge: Mapping[int, int]


# Windows of pCPUs: which tasks ran there, how often and how long. Times are in ns.
#
# Clocks are CLOCK_MONOTONIC. What a window means for isolation is decided in options/isolation.

PF_NO_SETAFFINITY: Final = 0x0400_0000
"""Task flag of a kernel thread whose affinity nobody may change (sched.h)."""

BUCKETS: Final = 24
"""Buckets of a histogram of slices, see `bucket_end_us`."""

IDLE_TASK: Final = 0
"""The tid of every CPU's idle task."""

CROWD: Final = -1
"""The tid that stands for all tasks beyond the most that are told apart."""


class RanTask(NamedTuple):
    """How often and how long a task had a pCPU in a window.

    `buckets` counts its slices by length. `parts` has its run time in the parts of the window in
    which it ran: number of the part, ns. `preempted`: how often it lost the pCPU although it was
    ready; `longest_wait_ns`: the longest time until it had the pCPU again.
    """

    tid: int
    slices: int
    ran_ns: int
    longest_ns: int
    buckets: tuple[int, ...] = (0,) * BUCKETS
    parts: tuple[tuple[int, int], ...] = ()
    preempted: int = 0
    longest_wait_ns: int = 0


class CpuWindow(Struct, frozen=True):
    """What ran on one pCPU from `start_ns` to `end_ns`.

    `lost` counts records that were dropped, `unknown_ns` is time of which therefore nothing is
    known. `problem` says why the window is not whole, empty if it is.
    """

    cpu: int
    start_ns: int
    end_ns: int
    tasks: tuple[RanTask, ...] = ()
    records: int = 0
    lost: int = 0
    unknown_ns: int = 0
    problem: str = ""

    @property
    def length_ns(self) -> int:
        """How long it was."""
        return self.end_ns - self.start_ns


class SeenTask(Struct, frozen=True):
    """A task as it was seen while or after it ran.

    `affinity` is None and `cgroup` empty where it was gone before it was looked at; then `parent`
    names the process that made it, if that is known. `by_root`: all its user ids are root's.
    `process` is the name of its process, empty if that is not known.
    """

    tid: int
    pid: int
    comm: str
    flags: int = 0
    affinity: CpuSet | None = None
    cgroup: str = ""
    parent: str = ""
    by_root: bool = False
    process: str = ""

    @property
    def kernel(self) -> bool:
        """Whether it is a kernel thread."""
        return bool(self.flags & PF_KTHREAD)

    @property
    def bound(self) -> bool:
        """Whether it is a kernel thread that belongs to one CPU and cannot be moved.

        An unbound worker is none, even if its pool is of one CPU (a workqueue's affinity scope, or
        a mask of one CPU): the mask of unbound workqueues moves its work.
        """
        fixed = self.kernel and bool(self.flags & PF_NO_SETAFFINITY)
        fixed = fixed and not self.comm.startswith("kworker/u")
        return fixed and self.affinity is not None and len(self.affinity) == 1


class MeasuredInterrupt(NamedTuple):
    """An interrupt on a pCPU: `kind` is hardware, softirq or ipi; `irq` is -1 for the others.

    `managed`: the kernel places it itself and lets nobody move it.
    """

    cpu: int
    kind: TracedKind
    name: str
    irq: int
    times: int
    total_ns: int
    longest_ns: int
    managed: bool = False


class MeasuredExits(NamedTuple):
    """How often and how long a vCPU thread was outside its guest for one reason.

    `name` is KVM's name of the reason, empty if this host's KVM has none. Exits in which the vCPU
    halted are counted apart: `halts`, `halted_ns`. `long` are those of 100 us or more.
    """

    tid: int
    reason: int
    name: str = ""
    times: int = 0
    total_ns: int = 0
    longest_ns: int = 0
    long: int = 0
    halts: int = 0
    halted_ns: int = 0


class KvmCounts(NamedTuple):
    """What KVM counts of all vCPUs of a VM since it was made.

    A vCPU that halts is polled for at first: `polled_ns` ended with work, `wasted_ns` did not, and
    then it slept for `slept_ns`.
    """

    exits: int
    halts: int
    polled_ns: int
    wasted_ns: int
    slept_ns: int


class Measured(Struct, frozen=True):
    """One measurement of some pCPUs.

    `times` are by tid, before and after, of the threads that were asked for and lived through it,
    `cpu_runs` the same by pCPU.
    `interrupts` is None where they were not measured, and `no_interrupts` says why; `exits` of the
    pCPUs' vCPUs likewise. `kvm` has by process what KVM counted of its VM, before and after;
    `no_kvm` says why some are left out.
    `refused` says of each better method why it was not used.
    """

    method: Method
    cpus: Mapping[int, CpuWindow]
    tasks: Mapping[int, SeenTask] = field(default_factory=dict)
    times: Mapping[int, tuple[TaskRun, TaskRun]] = field(default_factory=dict)
    cpu_runs: Mapping[int, tuple[CpuRun, CpuRun]] = field(default_factory=dict)
    parts: int = 0
    reader_ns: int = 0
    interrupts: tuple[MeasuredInterrupt, ...] | None = None
    no_interrupts: str = ""
    exits: tuple[MeasuredExits, ...] | None = None
    no_exits: str = ""
    kvm: Mapping[int, tuple[KvmCounts, KvmCounts]] = field(default_factory=dict)
    no_kvm: str = ""
    refused: tuple[tuple[Method, str], ...] = ()


def bucket_end_us(bucket: int) -> float:
    """Return the upper end of a bucket in microseconds: of the first 1, then twice as wide each."""
    return (1 << bucket) * 1.024
