"""What disturbs exclusive pCPUs beside tasks: a part of the state document."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import Cpus
from kata_pin.model.reports.doctor import Row


@dataclass(frozen=True, slots=True)
class QuietInterrupt:
    """A numbered interrupt on an exclusive pCPU."""

    number: int  #: its number in /proc/irq
    name: str  #: who handles it; the chip's name if nobody does
    #: One of `movable`, `managed` (the kernel places it), `guest` (of a device given to a VM)
    kind: str
    mask: Cpus  #: pCPUs that it is allowed
    per_s: float  #: how often it fired per second; 0: not at all, but the kernel chose this pCPU


@dataclass(frozen=True, slots=True)
class QuietSibling:
    """Another hardware thread of the same core."""

    cpu: int  #: the pCPU
    owner: str  #: pod that has it exclusively; empty: none, anything may run there


@dataclass(frozen=True, slots=True)
class QuietCpu:
    """One exclusive pCPU."""

    cpu: int  #: the pCPU
    owner: str  #: pod that has it exclusively
    container: str  #: container that has it; empty: unknown
    #: numbered interrupts on it, the most frequent first; null: unknown
    interrupts: tuple[QuietInterrupt, ...] | None
    tick_per_s: float | None  #: local timer interrupts per second; null: unknown
    ipi_per_s: float | None  #: interrupts by other pCPUs per second; null: unknown
    softirqs: dict[str, float] | None  #: soft interrupts per second by name; null: unknown
    kernel_threads: int | None  #: kernel threads that can be moved and may run here; null: unknown
    nohz_full: bool | None  #: whether the tick stops while one task runs; null: unknown
    #: pm_qos_resume_latency_us: `0` no limit, `n/a` no idle state; null: unknown
    idle_limit: str | None
    governor: str | None  #: frequency governor; null: unknown, or none
    frequency_with: Cpus  #: pCPUs of the same frequency policy
    siblings: tuple[QuietSibling, ...]  #: other threads of its core


@dataclass(frozen=True, slots=True)
class QuietSpared:
    """An exclusive pCPU that should be quiet and is not."""

    cpu: int  #: the pCPU
    reason: str  #: why it is not


@dataclass(frozen=True, slots=True)
class KeptQuiet:
    """What the daemon does to keep exclusive pCPUs quiet, as of its last round."""

    level: str  #: One of `off`, `report`, `irq`, `full`: the setting `quiet`
    cpus: Cpus  #: pCPUs that interrupts are kept off
    full: Cpus  #: those of them that the kernel's own work is kept off too
    crio: Cpus  #: those whose default mask and ban of irqbalance are left to CRI-O
    spared: tuple[QuietSpared, ...]  #: pCPUs that should be quiet and are not
    #: values that are changed now, by kind: `interrupt`, `default-mask`, `irqbalance`,
    #: `workqueues`, `watchdog`, `kernel-thread`, `rps`, `xps`, `idle-limit`, `governor`
    changed: dict[str, int]
    failed_writes: dict[str, int]  #: writes that failed since the daemon's start, by kind
    managed: int  #: managed interrupts that may fire on quiet pCPUs: the kernel places them
    movable_fired: int  #: times that movable interrupts fired there since the daemon's start
    managed_fired: int  #: times that managed ones did
    irqbalance: tuple[int, ...]  #: pids of irqbalance that are asked to keep clear of them
    left: tuple[str, ...]  #: what is left to another writer for now
    problems: tuple[str, ...]  #: what could not be set, and why


@dataclass(frozen=True, slots=True)
class QuietSandbox:
    """What is done to keep the exclusive pCPUs of a sandbox quiet."""

    #: One of `off`, `irq` (interrupts are kept off), `full` (the kernel's own work too)
    level: str
    cpus: Cpus  #: pCPUs that are quiet
    not_quiet: Cpus  #: its other exclusive pCPUs
    idle_limit: str  #: limit of idle states that its annotation asks for; empty: none
    governor: str  #: frequency governor that its annotation asks for; empty: none
    managed: int  #: managed interrupts that may fire on its quiet pCPUs: the kernel places them
    problems: tuple[str, ...]  #: what could not be done, and why


@dataclass(frozen=True, slots=True)
class Quiet:
    """What disturbs exclusive pCPUs; read by `show --cpus` alone."""

    measured_s: float  #: how long interrupts were counted
    cpus: tuple[QuietCpu, ...]  #: one object per exclusive pCPU
    rows: tuple[Row, ...]  #: findings about the node and its sandboxes, as `doctor` has them
    problems: tuple[str, ...]  #: counters that could not be read
