"""The kernel's counters at one moment, and the rates between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kata_pin.model.measured.cache import CacheUse
from kata_pin.model.measured.counters import (
    Counts,
    CpuRun,
    CpuTimes,
    TaskMoves,
    TaskRun,
    Throttling,
)
from kata_pin.model.thread import ThreadKey


class TaskSample(NamedTuple):
    """One thread. None: not read, or not told by this kernel.

    `ready` is whether it runs or waits for a CPU right now (state R).
    """

    run: TaskRun
    moves: TaskMoves | None
    last_cpu: int | None
    ready: bool


class CpuSample(NamedTuple):
    """One CPU. None: the file could not be read, or the CPU is offline."""

    times: CpuTimes | None
    run: CpuRun | None
    interrupts: Counts | None
    softirqs: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class Sample:
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
