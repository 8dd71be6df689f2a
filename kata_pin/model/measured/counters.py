"""The kernel's running counters of tasks, CPUs and cgroups. All grow from birth or boot."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

TICK_NS: Final = 10_000_000
"""Resolution of /proc/stat: USER_HZ is 100 on every Linux that Kata runs on."""


class TaskRun(NamedTuple):
    """How long a thread ran, how long it was ready but had to wait, and in how many slices.

    Time that it waits is added only when it gets a CPU: while it starves, nothing grows.
    """

    ran_ns: int
    waited_ns: int
    slices: int


class TaskMoves(NamedTuple):
    """How often a thread lost its CPU although it was ready, and was moved to another CPU.

    None: this kernel does not tell.
    """

    preemptions: int | None
    migrations: int | None


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


class InterruptKind(Enum):
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
