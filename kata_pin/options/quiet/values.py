"""What disturbs pCPUs beside tasks, and what kata-pin changes of it for a while."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

from msgspec import Struct

from kata_pin.base.counters import CpuSample
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.linux.interrupts import Interrupt
from kata_pin.rights.broker.tunables import TunableKind

Value = TypeVar("Value")


class Unknown(Struct, frozen=True):
    """Why something is not known; `absent`: this node has no such file, so nothing is hidden."""

    reason: str
    absent: bool = False


class MovableThread(Struct, frozen=True):
    """A kernel thread that may be moved: its affinity is not fixed by the kernel."""

    tid: int
    comm: str
    affinity: CpuSet
    starttime: int = 0


class Queue(Struct, frozen=True):
    """A queue of a network device and who handles its packets; `kind` is `rps` or `xps`.

    Without pCPUs its packets are not spread.
    """

    device: str
    name: str
    kind: str
    cpus: CpuSet


class FrequencyPolicy(Struct, frozen=True):
    """The frequency of some pCPUs; `available` are the governors that it can have."""

    name: str
    cpus: CpuSet
    governor: str
    available: frozenset[str]


class Power(Struct, frozen=True):
    """Idle states and frequency of one pCPU.

    `latency` is the text of pm_qos_resume_latency_us: `0` no limit, `n/a` no idle state at all,
    else microseconds. `shared` are the pCPUs that have the same frequency policy.
    """

    latency: str | Unknown
    governor: str | Unknown
    shared: CpuSet = EMPTY


class Irqbalance(Struct, frozen=True):
    """A running irqbalance: its bans by environment, and those in force as its socket says."""

    pid: int
    environment: Mapping[str, str] | Unknown
    banned: CpuSet | Unknown


class Tuned(Struct, frozen=True):
    """A running tuned; `isolates`: its profile names isolated cores, so it writes masks."""

    pid: int
    profile: str | Unknown
    isolates: bool


class Crio(Struct, frozen=True):
    """A running CRI-O; `hooks` are files of its configuration that switch its hooks on."""

    pid: int
    hooks: tuple[str, ...] | Unknown


class Partition(Struct, frozen=True):
    """A cgroup with a cpuset partition: what its cpuset.cpus.partition reads, and its CPUs."""

    cgroup: str
    state: str
    cpus: CpuSet


class QuietFacts(Struct, frozen=True, kw_only=True):
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
    threads: tuple[MovableThread, ...] | Unknown
    offloaded: CpuSet
    queues: tuple[Queue, ...] | Unknown
    power: Mapping[int, Power]
    irqbalance: Irqbalance | Unknown | None
    tuned: Tuned | Unknown | None
    crio: Crio | Unknown | None
    partitions: tuple[Partition, ...] | Unknown


class SandboxFacts(Struct, frozen=True):
    """A sandbox with exclusive pCPUs: `quota` is in CPUs, None where none is set.

    `throttled` is how often its quota stopped it and for how many seconds in all; `cookie` that of
    core scheduling, 0 for none.
    """

    sandbox: str
    pod: str
    quota: float | Unknown | None
    throttled: tuple[int, float] | Unknown
    cookie: int | Unknown


class Reading(Struct, frozen=True):
    """Counters at one moment: interrupts by number, samples by pCPU; `time_s` is monotonic."""

    time_s: float
    interrupts: Mapping[int, tuple[str, Mapping[int, int]]]
    cpus: Mapping[int, CpuSample]
    problems: tuple[str, ...] = ()


# Tunables: values of the kernel or of a daemon that are changed for a while, and given back.


ENDING: Final = frozenset({TunableKind.KERNEL_THREAD, TunableKind.RPS, TunableKind.XPS})
"""Kinds of kernel work of which one ends for good, and is forgotten then.

One of another kind that is not there, such as that of an offline pCPU, comes back with its value.
"""


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


class TunableRecord(Struct, frozen=True):
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


class KeepOff(Struct, frozen=True):
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


class Include(Struct, frozen=True):
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


class TakeOut(Struct, frozen=True):
    """A list must have none of the pCPUs `off`; nothing is ever added to it."""

    off: CpuSet

    def value(self, first: str) -> str:
        """Return the list to write."""
        return NO_CPU if first == NO_CPU else str(CpuSet.parse(first) - self.off) or NO_CPU

    def holds(self, value: str) -> bool:
        """Return whether a list is as it must be."""
        return value == NO_CPU or CpuSet.parse(value).isdisjoint(self.off)


class Exactly(Struct, frozen=True):
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


class QuietState(Struct, frozen=True):
    """The desired state of the node: `quiet` pCPUs, and `housekeeping`, all others online.

    `full` are the quiet ones that the kernel's own work is kept off, `crio` those that CRI-O cares
    for. `spared`: who had to stay with the housekeeping ones.
    """

    quiet: CpuSet = EMPTY
    housekeeping: CpuSet = EMPTY
    full: CpuSet = EMPTY
    crio: CpuSet = EMPTY
    spared: tuple[Spared, ...] = ()


class PowerGoals(Struct, frozen=True):
    """How single pCPUs must be: limits of idle states and frequency governors, by pCPU.

    LEAVE is a pCPU that somebody else sets.
    """

    idle: Mapping[int, str]
    governors: Mapping[int, str]


LEAVE: Final = "leave"
"""A value that is not set, in settings and in goals."""
