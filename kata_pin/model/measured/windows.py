"""Windows of pCPUs: which tasks ran there, how often and how long. Times are in ns.

Clocks are CLOCK_MONOTONIC. What a window means for isolation is decided in policy/isolation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.counters import CpuRun, TaskRun
from kata_pin.model.thread import PF_KTHREAD

PF_NO_SETAFFINITY: Final = 0x0400_0000
"""Task flag of a kernel thread whose affinity nobody may change (sched.h)."""

BUCKETS: Final = 24
"""Buckets of a histogram of slices, see `bucket_end_us`."""

IDLE: Final = 0
"""The tid of every CPU's idle task."""

CROWD: Final = -1
"""The tid that stands for all tasks beyond the most that are told apart."""


class Method(StrEnum):
    """How a window was measured, best first."""

    PERF = "perf"  # records of every switch
    HIST = "hist"  # histograms that the kernel made of its tracepoints
    SCHEDSTAT = "schedstat"  # the difference of a CPU's slices and its own threads'
    WAIT = "wait"  # how long its own threads waited for it


class Verdict(StrEnum):
    """Whether a pCPU was its owner's alone."""

    PROVED = "proved"
    VIOLATED = "violated"
    UNPROVED = "unproved"


class TaskClass(StrEnum):
    """Whose task ran on an exclusive pCPU."""

    OWN = "own"  # placed there
    SAME_POD = "same-pod"
    OTHER_SANDBOX = "other-sandbox"
    USER = "user"
    UNBOUND_KERNEL = "unbound-kernel"
    PER_CPU_KERNEL = "per-cpu-kernel"  # unavoidable
    UNKNOWN = "unknown"


class RanTask(NamedTuple):
    """How often and how long a task had a pCPU in a window.

    `buckets` counts its slices by length. `parts` has its run time in the parts of the window in
    which it ran: number of the part, ns.
    """

    tid: int
    slices: int
    ran_ns: int
    longest_ns: int
    buckets: tuple[int, ...] = (0,) * BUCKETS
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CpuWindow:
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


@dataclass(frozen=True, slots=True)
class SeenTask:
    """A task as it was seen while or after it ran.

    `affinity` is None and `cgroup` empty where it was gone before it was looked at; then `parent`
    names the process that made it, if that is known. `by_root`: all its user ids are root's.
    """

    tid: int
    pid: int
    comm: str
    flags: int = 0
    affinity: CpuSet | None = None
    cgroup: str = ""
    parent: str = ""
    by_root: bool = False

    @property
    def kernel(self) -> bool:
        """Whether it is a kernel thread."""
        return bool(self.flags & PF_KTHREAD)

    @property
    def bound(self) -> bool:
        """Whether it is a kernel thread that belongs to one CPU and cannot be moved."""
        fixed = self.kernel and bool(self.flags & PF_NO_SETAFFINITY)
        return fixed and self.affinity is not None and len(self.affinity) == 1


class Interrupt(NamedTuple):
    """An interrupt on a pCPU: `kind` is hardware, softirq or ipi; `irq` is -1 for the others."""

    cpu: int
    kind: str
    name: str
    irq: int
    times: int
    total_ns: int
    longest_ns: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement of some pCPUs.

    `times` are by tid, before and after, of the threads that were asked for and lived through it,
    `cpu_runs` the same by pCPU.
    `interrupts` is None where they were not measured, and `no_interrupts` says why. `refused` says
    of each better method why it was not used.
    """

    method: Method
    cpus: Mapping[int, CpuWindow]
    tasks: Mapping[int, SeenTask] = field(default_factory=dict)
    times: Mapping[int, tuple[TaskRun, TaskRun]] = field(default_factory=dict)
    cpu_runs: Mapping[int, tuple[CpuRun, CpuRun]] = field(default_factory=dict)
    parts: int = 0
    reader_ns: int = 0
    interrupts: tuple[Interrupt, ...] | None = None
    no_interrupts: str = ""
    refused: tuple[tuple[str, str], ...] = ()


def bucket_of(ran_ns: int) -> int:
    """Return the bucket of a slice: 0 up to 1 us, then twice as wide each."""
    return min((ran_ns >> 10).bit_length(), BUCKETS - 1)


def bucket_end_us(bucket: int) -> float:
    """Return the upper end of a bucket in microseconds."""
    return (1 << bucket) * 1.024
