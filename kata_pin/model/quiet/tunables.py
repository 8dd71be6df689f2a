"""Tunables: values of the kernel or of a daemon that are changed for a while, and given back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from kata_pin.model.cpuset import EMPTY, CpuSet


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
    IDLE_LIMIT = "idle-limit"  # microseconds, see Power.latency; its name is the pCPU
    GOVERNOR = "governor"  # a word; its name is the frequency policy's number


LASTING: Final = frozenset(
    {
        *(TunableKind.WORKQUEUES, TunableKind.WATCHDOG),
        *(TunableKind.IDLE_LIMIT, TunableKind.GOVERNOR),
    }
)
"""Kinds of which none ends: that of an offline pCPU comes back with its value."""


class TunableKey(NamedTuple):
    """Which one; `name` is empty where a kind has only one."""

    kind: TunableKind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


class Observed(NamedTuple):
    """A tunable as it is now.

    `identity` tells it from another one that gets the same name later: a device's description, a
    process's start. `label` is what people know it by. `fixed`: nobody can change it.
    """

    key: TunableKey
    identity: str
    value: str
    label: str = ""
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class TunableRecord:
    """What is remembered of a tunable that was changed; stored before each write.

    `first` is the value before our first write, `written` what we wrote last, or are about to.
    `previous` is what it had before that, empty once it is known that the write was made: after a
    crash both are ours.
    """

    key: TunableKey
    identity: str
    first: str
    written: str
    previous: str = ""

    def is_ours(self, value: str) -> bool:
        """Return whether we wrote a value, or found it before a write that was not made."""
        return value == self.written or (self.previous != "" and value == self.previous)


@dataclass(frozen=True, slots=True)
class KeepOff:
    """A mask must have none of the pCPUs `off`.

    What is left of the first mask counts, else the first of `homes` that has pCPUs. `online`: the
    kernel takes no mask without one of these.
    """

    off: CpuSet
    online: CpuSet
    homes: tuple[CpuSet, ...] = ()

    def value(self, first: str) -> str:
        """Return the mask to write; empty where none is possible."""
        left = CpuSet.parse(first) - self.off
        for one in (left, *self.homes):
            if (one - self.off) & self.online:
                return str(one - self.off)
        return ""

    def holds(self, value: str) -> bool:
        """Return whether a mask is as it must be."""
        return CpuSet.parse(value).isdisjoint(self.off)


@dataclass(frozen=True, slots=True)
class Include:
    """A list must have the pCPUs `cpus` beside those it had first."""

    cpus: CpuSet

    def value(self, first: str) -> str:
        """Return the list to write."""
        return str(CpuSet.parse(first) | self.cpus)

    def holds(self, value: str) -> bool:
        """Return whether a list is as it must be."""
        return self.cpus <= CpuSet.parse(value)


NO_CPU = "none"
"""A list of queues' pCPUs that has none: the queue is not spread."""


@dataclass(frozen=True, slots=True)
class TakeOut:
    """A list must have none of the pCPUs `off`; nothing is ever added to it."""

    off: CpuSet

    def value(self, first: str) -> str:
        """Return the list to write."""
        return NO_CPU if first == NO_CPU else str(CpuSet.parse(first) - self.off) or NO_CPU

    def holds(self, value: str) -> bool:
        """Return whether a list is as it must be."""
        return value == NO_CPU or CpuSet.parse(value).isdisjoint(self.off)


@dataclass(frozen=True, slots=True)
class Exactly:
    """A value that is not a set."""

    wanted: str

    def value(self, _first: str) -> str:
        """Return the value to write."""
        return self.wanted

    def holds(self, value: str) -> bool:
        """Return whether it is this one."""
        return value == self.wanted


Goal = KeepOff | Include | TakeOut | Exactly
"""How a tunable must be. `value` is made from the first value alone, never from the present one."""


class QuietClaim(NamedTuple):
    """Exclusive pCPUs of one sandbox that should be quiet.

    `full`: those of them where the kernel's own work is kept off too. `crio`: those whose default
    mask and irqbalance ban are CRI-O's, which acts on the pod's annotation itself. `devices` are
    the PCI addresses that VFIO gave to the sandbox, `own` all of its exclusive pCPUs. `idle` and
    `governor` are what its annotations ask for, as the kernel takes them (empty: as the settings
    say); with `crio_power` CRI-O sets them itself.
    """

    sandbox: str
    cpus: CpuSet
    full: CpuSet = EMPTY
    crio: CpuSet = EMPTY
    own: CpuSet = EMPTY
    devices: frozenset[str] = frozenset()
    idle: str = ""
    governor: str = ""
    crio_power: bool = False


class Spared(NamedTuple):
    """A pCPU that should be quiet and is not, and why."""

    cpu: int
    reason: str


@dataclass(frozen=True)
class QuietState:
    """The desired state of the node: `quiet` pCPUs, and `housekeeping`, all others online.

    `full` are the quiet ones that the kernel's own work is kept off, `crio` those that CRI-O cares
    for. `spared`: who had to stay with the housekeeping ones.
    """

    quiet: CpuSet = EMPTY
    housekeeping: CpuSet = EMPTY
    full: CpuSet = EMPTY
    crio: CpuSet = EMPTY
    spared: tuple[Spared, ...] = ()


@dataclass(frozen=True, slots=True)
class PowerGoals:
    """How single pCPUs must be: limits of idle states and frequency governors, by pCPU.

    LEAVE is a pCPU that somebody else sets.
    """

    idle: Mapping[int, str]
    governors: Mapping[int, str]


LEAVE: Final = "leave"
"""A value that is not set, in settings and in goals."""
