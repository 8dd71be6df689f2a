"""The prove document: what ran on exclusive pCPUs in a window, and what that proves."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION, Cpus
from kata_pin.model.reports.daemon import Daemon


@dataclass(frozen=True, slots=True)
class Refused:
    """A method that was not used."""

    method: str  #: One of `perf`, `hist`, `schedstat`, `wait`
    reason: str  #: why not


@dataclass(frozen=True, slots=True)
class TimelinePart:
    """One of the equal parts that the window is divided into."""

    part: int  #: its number, from 0
    ran_ms: float  #: how long the task ran on the pCPU in it


@dataclass(frozen=True, slots=True)
class OwnThread:
    """A thread that is placed on the pCPU."""

    tid: int  #: thread id
    label: str  #: role with the vCPU's index
    here_ms: float | None  #: time on this pCPU; null: not measured
    slices: int | None  #: how often it had this pCPU; null: not measured
    ran_ms: float | None  #: time on any pCPU (schedstat); null: it ended
    waited_ms: float | None  #: time that it was ready and waited for a pCPU, the guest's steal time
    timeline: tuple[TimelinePart, ...]  #: when; parts in which it did not run are left out


@dataclass(frozen=True, slots=True)
class RanTask:
    """Another task that ran on the pCPU."""

    #: One of `same-pod` (of the owner's pod), `other-sandbox`, `user` (any other process),
    #: `unbound-kernel` (a kernel thread that may run elsewhere), `per-cpu-kernel` (unavoidable, no
    #: violation), `unknown` (gone before it was looked at)
    task_class: str
    tid: int  #: thread id; -1: a row of several tasks, as there are too many
    pid: int  #: process id; 0: unknown
    comm: str  #: thread name; empty: unknown
    parent: str  #: the process that made it, where it is gone; else empty
    sandbox: str  #: id of its sandbox; empty: none
    pod: str  #: pod that it belongs to; empty: none
    unit: str  #: systemd unit that it belongs to; empty: none
    cgroup: str  #: its cgroup
    affinity: Cpus  #: pCPUs that it may use; empty: unknown
    slices: int  #: how often it came onto the pCPU
    total_ms: float | None  #: how long in all; null: not measured
    longest_ms: float | None  #: its longest slice; null: not measured
    timeline: tuple[TimelinePart, ...]  #: when; parts in which it did not run are left out
    remedy: str  #: what would keep it off the pCPU
    command: str  #: a command that does; empty: there is none
    tasks: int = 1  #: how many tasks the row is of


@dataclass(frozen=True, slots=True)
class RanInterrupt:
    """An interrupt that the pCPU handled."""

    interrupt: str  #: One of `hardware`, `softirq`, `ipi`
    name: str  #: name, such as `local_timer`, `RCU` or a device
    irq: int  #: number of a device's interrupt; -1: none
    times: int  #: how often
    total_ms: float  #: how long in all
    longest_ms: float  #: the longest
    remedy: str  #: what would keep it off the pCPU
    command: str  #: a command that does; empty: there is none


@dataclass(frozen=True, slots=True)
class HistogramBar:
    """Foreign slices of similar length."""

    up_to_us: float  #: longest slice that is counted here; the shorter ones are in the bar before
    slices: int  #: how many


@dataclass(frozen=True, slots=True)
class ProvedPcpu:
    """One exclusive pCPU."""

    cpu: int  #: the pCPU
    sandbox: str  #: id of the sandbox that owns it
    pod: str  #: pod of that sandbox
    container: str  #: name of the container that owns it; empty: unknown
    verdict: str  #: One of `proved`, `violated`, `unproved`
    reason: str  #: why
    window_s: float  #: how long it was measured
    records: int  #: records that were read
    lost: int  #: records that were lost
    own_ms: float | None  #: time of the threads placed here; this and the next six: null: unknown
    pod_ms: float | None  #: time of other tasks of the same pod
    #: time of everybody else's tasks, but for the next; by `schedstat` and `wait` at most so long,
    #: the next included
    foreign_ms: float | None
    unavoidable_ms: float | None  #: time of kernel threads that belong to this pCPU
    idle_ms: float | None  #: time without a task
    foreign_percent: float | None  #: `foreign_ms` as a share of the window
    foreign_slices: int | None  #: how often foreign tasks came onto it
    interrupt_ms: float | None  #: time in interrupts, which is part of the others; null: not asked
    own: tuple[OwnThread, ...]  #: the threads placed here
    tasks: tuple[RanTask, ...]  #: other tasks that ran there, worst class first, longest first
    tasks_left_out: int  #: so many tasks are summed up in rows of their classes, whose tid is -1
    interrupts: tuple[RanInterrupt, ...]  #: interrupts, longest first
    histogram: tuple[HistogramBar, ...]  #: foreign slices by length
    idle_timeline: tuple[TimelinePart, ...]  #: when no task ran there


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveDocument:
    """Printed by `prove`."""

    version: int = VERSION  #: version of the document
    kind: str = "prove"  #: kind of the document
    time: str  #: when the window ended
    daemon: Daemon  #: whether the daemon said who owns the pCPUs
    hostname: str  #: host name
    kernel: str  #: kernel release
    verdict: str  #: One of `proved`, `violated` (exit status 3), `unproved` (exit status 4)
    reason: str  #: the verdict in words
    method: str  #: One of `perf`, `hist`, `schedstat`, `wait`: how it was measured, best first
    refused: tuple[Refused, ...]  #: better methods that were not used
    asked_s: float  #: length of the window that was asked for
    max_foreign_percent: float  #: foreign share that is accepted
    parts: int  #: parts of every timeline; 0: none were made
    reader_ms: float  #: CPU time that measuring took
    pcpus: tuple[ProvedPcpu, ...]  #: one object per exclusive pCPU
