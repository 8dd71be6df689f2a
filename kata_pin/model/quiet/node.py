"""What the kernel and other programs do on pCPUs beside running tasks, as it was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.measured.samples import CpuSample
from kata_pin.model.quiet.interrupts import Interrupt

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why something is not known; `absent`: this node has no such file, so nothing is hidden."""

    reason: str
    absent: bool = False


@dataclass(frozen=True, slots=True)
class KernelThread:
    """A kernel thread that may be moved: its affinity is not fixed by the kernel."""

    tid: int
    comm: str
    affinity: CpuSet
    starttime: int = 0


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue of a network device and who handles its packets; `kind` is `rps` or `xps`.

    Without pCPUs its packets are not spread.
    """

    device: str
    name: str
    kind: str
    cpus: CpuSet


@dataclass(frozen=True, slots=True)
class FrequencyPolicy:
    """The frequency of some pCPUs; `available` are the governors that it can have."""

    name: str
    cpus: CpuSet
    governor: str
    available: frozenset[str]


@dataclass(frozen=True, slots=True)
class Power:
    """Idle states and frequency of one pCPU.

    `latency` is the text of pm_qos_resume_latency_us: `0` no limit, `n/a` no idle state at all,
    else microseconds. `shared` are the pCPUs that have the same frequency policy.
    """

    latency: str | Unknown
    governor: str | Unknown
    shared: CpuSet = EMPTY


@dataclass(frozen=True, slots=True)
class Irqbalance:
    """A running irqbalance: its bans by environment, and those in force as its socket says."""

    pid: int
    environment: Mapping[str, str] | Unknown
    banned: CpuSet | Unknown


@dataclass(frozen=True, slots=True)
class Tuned:
    """A running tuned; `isolates`: its profile names isolated cores, so it writes masks."""

    pid: int
    profile: str | Unknown
    isolates: bool


@dataclass(frozen=True, slots=True)
class Crio:
    """A running CRI-O; `hooks` are files of its configuration that switch its hooks on."""

    pid: int
    hooks: tuple[str, ...] | Unknown


@dataclass(frozen=True, slots=True)
class Partition:
    """A cgroup with a cpuset partition: what its cpuset.cpus.partition reads, and its CPUs."""

    cgroup: str
    state: str
    cpus: CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietFacts:
    """The whole node.

    `threads` are kernel threads that may be moved, `offloaded` the pCPUs whose RCU callbacks
    threads run, `boot` the parameters of the kernel's command line.
    """

    interrupts: tuple[Interrupt, ...] | Unknown
    default_mask: CpuSet | Unknown
    workqueues: CpuSet | Unknown
    watchdog: bool | Unknown
    watchdog_mask: CpuSet | Unknown
    numa_balancing: str | Unknown
    rt_runtime_us: str | Unknown
    nohz_full: CpuSet | Unknown
    boot: Mapping[str, str] | Unknown
    threads: tuple[KernelThread, ...] | Unknown
    offloaded: CpuSet
    queues: tuple[Queue, ...] | Unknown
    power: Mapping[int, Power] = field(hash=False)
    irqbalance: Irqbalance | Unknown | None
    tuned: Tuned | Unknown | None
    crio: Crio | Unknown | None
    partitions: tuple[Partition, ...] | Unknown


@dataclass(frozen=True, slots=True)
class SandboxFacts:
    """A sandbox with exclusive pCPUs: `quota` is in CPUs, None where none is set.

    `throttled` is how often its quota stopped it and for how many seconds in all; `cookie` that of
    core scheduling, 0 for none.
    """

    sandbox: str
    pod: str
    quota: float | Unknown | None
    throttled: tuple[int, float] | Unknown
    cookie: int | Unknown


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment: interrupts by number, samples by pCPU; `time_s` is monotonic."""

    time_s: float
    interrupts: Mapping[int, tuple[str, Mapping[int, int]]] = field(hash=False)
    cpus: Mapping[int, CpuSample] = field(hash=False)
    problems: tuple[str, ...] = ()
