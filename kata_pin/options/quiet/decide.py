"""Which pCPUs should be quiet, and what that takes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from kata_pin.base.counters import InterruptKind
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.settings import QuietPods, VfioInterrupts
from kata_pin.base.values import Movability, QuietLevel
from kata_pin.linux.interrupts import NO_NODE, Interrupt
from kata_pin.options.quiet.values import (
    LEAVE,
    Exactly,
    FrequencyPolicy,
    Goal,
    KeepOff,
    Observed,
    PowerGoals,
    QuietClaim,
    QuietState,
    Reading,
    Spared,
    TakeOut,
    TunableKey,
    TunableRecord,
)
from kata_pin.rights.broker.tunables import TunableKind

# What a pod asks for by annotation, and what it gets: never more than the setting `quiet` (D17).
#
# `cpu-quiet.kata-pin.io: off|irq|full` wins over CRI-O's `irq-load-balancing.crio.io[/CONTAINER]`:
# `disable` (or `true`, its old name) and `housekeeping`, which leaves the container's first pCPU
# and that one's siblings to interrupts. `cpu-c-states.crio.io` and `cpu-freq-governor.crio.io` are
# for all exclusive pCPUs of a pod. Values of CRI-O's: cri-o, internal/runtimehandlerhooks.

QUIET_KEY: Final = "cpu-quiet.kata-pin.io"
CRIO_KEY: Final = "irq-load-balancing.crio.io"
C_STATES_KEY: Final = "cpu-c-states.crio.io"
GOVERNOR_KEY: Final = "cpu-freq-governor.crio.io"

_OWN: Final = {"off": QuietLevel.OFF, "irq": QuietLevel.IRQ, "full": QuietLevel.FULL}
_CRIO: Final = {
    **dict.fromkeys(("disable", "true", "housekeeping"), QuietLevel.IRQ),
    "enable": QuietLevel.OFF,
}
_C_STATES: Final = {"enable": "0", "disable": "n/a"}
_VALID: Final = {
    QUIET_KEY: "off, irq, full",
    CRIO_KEY: "disable, housekeeping, enable",
    C_STATES_KEY: "enable, disable, max_latency:MICROSECONDS",
    GOVERNOR_KEY: "the name of a governor",
}
_LATENCY: Final = re.compile(r"max_latency:0{0,9}([1-9][0-9]{0,8})\Z")
_GOVERNOR: Final = re.compile(r"[a-z][a-z0-9_]{0,14}\Z")
"""What a governor may be called (CPUFREQ_NAME_LEN)."""


class QuietWish(Struct, frozen=True):
    """What one container gets, and why it is not what was asked for (empty: it is).

    `housekeeping`: its first core stays with interrupts. `crio`: CRI-O's annotation was used.
    """

    level: QuietLevel
    housekeeping: bool = False
    crio: bool = False
    problem: str = ""


def wish(
    annotations: Mapping[str, str],
    container: str,
    *,
    level: QuietLevel,
    pods: QuietPods,
    allowed: bool,
) -> QuietWish:
    """Return what a container of a pod with these annotations gets under the node's `level`."""
    default = level if pods is QuietPods.ALL else QuietLevel.OFF
    named = f"{CRIO_KEY}/{container}"
    key = next((one for one in (QUIET_KEY, named, CRIO_KEY) if one in annotations), "")
    if not key:
        return QuietWish(default)
    value = annotations[key]
    asked = (_OWN if key == QUIET_KEY else _CRIO).get(value)
    if asked is None:
        return QuietWish(default, problem=_invalid(key, value))
    if not allowed:
        return QuietWish(default, problem=f"annotation {key} ignored: no rule of alloc.allow")
    chosen = min(asked, level, key=lambda one: one.rank)
    problem = f"annotation {key}: {asked} is more than quiet: {level}" if chosen != asked else ""
    crio = key != QUIET_KEY and chosen.acts
    return QuietWish(chosen, crio and value == "housekeeping", crio, problem)


class PowerWish(Struct, frozen=True):
    """What a pod gets of what it asks for, as the kernel takes it; empty: as the settings say.

    `idle` is a limit of idle states (see Power.latency). `problems`: why it is not what was asked
    for.
    """

    idle: str = ""
    governor: str = ""
    problems: tuple[str, ...] = ()


def power_wish(
    annotations: Mapping[str, str], *, level: QuietLevel, allowed: bool, crio: bool
) -> PowerWish:
    """Return the idle states and the governor of a pod under the node's `level`.

    With `crio` the pod is CRI-O's, which follows its annotations whatever the settings here are.
    """
    problems = []
    found = {C_STATES_KEY: "", GOVERNOR_KEY: ""}
    for key, read in ((C_STATES_KEY, _idle_limit), (GOVERNOR_KEY, _governor)):
        value = annotations.get(key)
        if value is None:
            continue
        asked = read(value)
        if not asked:
            problems.append(_invalid(key, value))
        elif crio:
            found[key] = asked
        elif not allowed:
            problems.append(f"annotation {key} ignored: no rule of alloc.allow")
        elif level is not QuietLevel.FULL:
            problems.append(f"annotation {key} ignored: it needs quiet: full, not {level}")
        else:
            found[key] = asked
    return PowerWish(found[C_STATES_KEY], found[GOVERNOR_KEY], tuple(problems))


def _invalid(key: str, value: str) -> str:
    valid = _VALID[key.partition("/")[0]]
    return f"annotation {key}: invalid value {value[:40]!r}; valid: {valid}"


def _idle_limit(value: str) -> str:
    latency = _LATENCY.match(value)
    return latency[1] if latency is not None else _C_STATES.get(value, "")


def _governor(value: str) -> str:
    return value if _GOVERNOR.match(value) else ""


def quiet_part(cpus: CpuSet, topology: HostTopology, found: QuietWish) -> CpuSet:
    """Return which of a container's pCPUs are to be quiet."""
    if not found.level.acts or not cpus:
        return EMPTY
    if not found.housekeeping:
        return cpus
    return cpus - topology.siblings(cpus.first) - CpuSet([cpus.first])


# The desired state of the node as a function of its topology, its interrupts and the placements.
#
# Nothing is derived from the masks that are there now (D22).


def quiet_state(
    topology: HostTopology, claims: Iterable[QuietClaim], interrupt_nodes: Collection[int]
) -> QuietState:
    """Return which pCPUs are quiet: those claimed, but for one on each NUMA node with interrupts.

    `interrupt_nodes` are the nodes of the interrupts that there are.
    """
    claims = tuple(claims)
    wanted = union(one.cpus for one in claims) & topology.online
    spared = tuple(_spared(topology, wanted, interrupt_nodes))
    quiet = wanted - CpuSet(one.cpu for one in spared)
    return QuietState(
        quiet,
        topology.online - quiet,
        union(one.full for one in claims) & quiet,
        union(one.crio for one in claims) & quiet,
        spared,
    )


def _spared(
    topology: HostTopology, wanted: CpuSet, interrupt_nodes: Collection[int]
) -> Iterator[Spared]:
    """Yield the first pCPU of each node that has interrupts and would have no other for them."""
    found = False
    for node, cpus in topology.nodes.items():
        if node in interrupt_nodes and cpus and cpus <= wanted:
            found = True
            reason = f"NUMA node {node} has interrupts, and no other pCPU that could handle them"
            yield Spared(topology.in_order(cpus)[0], reason)
    if not found and wanted and topology.online <= wanted:
        yield Spared(
            topology.in_order(wanted)[0], "no other pCPU is left that could handle interrupts"
        )


def interrupt_goals(
    topology: HostTopology,
    state: QuietState,
    interrupts: Iterable[Interrupt],
    claims: Iterable[QuietClaim],
    vfio: VfioInterrupts,
) -> Mapping[TunableKey, Goal]:
    """Return how each interrupt must be, none for those that may go anywhere."""
    owners: dict[str, CpuSet] = {}
    if vfio is VfioInterrupts.OWN:
        owners = {device: one.own for one in claims for device in one.devices}
    goals: dict[TunableKey, Goal] = {}
    made: dict[tuple[int, int], Goal] = {}  # most interrupts have one of a few goals
    for one in interrupts:
        own = union(owners.get(device, EMPTY) for device in one.row.vfio)
        off = state.quiet - own
        if off:
            goal = made.get((off.bits, one.node))
            if goal is None:
                near = topology.nodes.get(one.node, EMPTY) if one.node != NO_NODE else EMPTY
                homes = (near & state.housekeeping, state.housekeeping)
                goal = made[off.bits, one.node] = KeepOff(off, topology.online, homes)
            goals[TunableKey(TunableKind.INTERRUPT, str(one.number))] = goal
    return goals


def first_mask(topology: HostTopology, default: TunableRecord, born: Interrupt) -> str:
    """Return the mask that a new interrupt would have, had the default mask not been narrowed.

    Empty if it did not get its mask from the narrowed default mask. The kernel takes what is online
    of that, on the interrupt's NUMA node if there is any (kernel/irq/manage.c, irq_setup_affinity).
    """
    near = topology.nodes.get(born.node, EMPTY) if born.node != NO_NODE else EMPTY

    def initial(mask: str) -> CpuSet:
        there = CpuSet.parse(mask) & topology.online
        return there & near or there

    narrowed, first = initial(default.written), initial(default.first)
    return str(first) if born.mask == narrowed != first and not born.managed else ""


# Which interrupts disturb exclusive pCPUs, from two readings of the counters.

MOVABLE: Final = "movable"
MANAGED: Final = "managed"
GUEST: Final = "guest"

_KINDS: Final = {
    "tick": frozenset({InterruptKind.TICK}),
    "ipi": frozenset({InterruptKind.RESCHEDULE, InterruptKind.CALL}),
}


class Firing(Struct, frozen=True):
    """An interrupt on a pCPU: how often per second it fired, 0 for one that would fire there."""

    cpu: int
    interrupt: Interrupt
    per_s: float

    @property
    def kind(self) -> Movability:
        """Return whether it can be moved: `movable`, `managed`, or `guest` (of VFIO)."""
        one = self.interrupt
        return GUEST if one.row.vfio else MANAGED if one.managed else MOVABLE


def firing(
    interrupts: tuple[Interrupt, ...], first: Reading, last: Reading, cpus: CpuSet
) -> list[Firing]:
    """Return the interrupts that fired on these pCPUs, or that the kernel would have fire there.

    By pCPU, those that fired most first.
    """
    found = [one for cpu in cpus for one in _on(cpu, interrupts, first, last)]
    return sorted(found, key=lambda one: (one.cpu, -one.per_s, one.interrupt.number))


def _on(
    cpu: int, interrupts: tuple[Interrupt, ...], first: Reading, last: Reading
) -> Iterator[Firing]:
    seconds = max(last.time_s - first.time_s, 1e-9)
    for one in interrupts:
        before, after = first.interrupts.get(one.number), last.interrupts.get(one.number)
        count = 0
        # An interrupt of another text is another device's: its counts start again.
        if before is not None and after is not None and before[0] == after[0]:
            count = max(0, after[1].get(cpu, 0) - before[1].get(cpu, 0))
        if count or cpu in one.effective:
            yield Firing(cpu, one, round(count / seconds, 1))


def rate_of(kind: str, cpu: int, first: Reading, last: Reading) -> float | None:
    """Return the ticks or interrupts by other pCPUs (`tick`, `ipi`) per second; None: unknown."""
    one, two = first.cpus.get(cpu), last.cpus.get(cpu)
    if one is None or two is None or one.interrupts is None or two.interrupts is None:
        return None
    grown = sum(two.interrupts[each] - one.interrupts[each] for each in _KINDS[kind])
    return _per_s(grown, first, last)


def softirq_rates(cpu: int, first: Reading, last: Reading) -> dict[str, float] | None:
    """Return soft interrupts per second by name, those that ran; None: unknown."""
    one, two = first.cpus.get(cpu), last.cpus.get(cpu)
    if one is None or two is None or one.softirqs is None or two.softirqs is None:
        return None
    grown = {name: count - one.softirqs.get(name, 0) for name, count in two.softirqs.items()}
    return {name: _per_s(count, first, last) for name, count in grown.items() if count > 0}


def _per_s(count: int, first: Reading, last: Reading) -> float:
    return round(max(0, count) / max(last.time_s - first.time_s, 1e-9), 1)


# How the kernel's own work must be kept off pCPUs that are quiet in full.
#
# Network queues only lose pCPUs, so no packet goes where it did not go before.

_LISTS: Final = frozenset({TunableKind.WORKQUEUES, TunableKind.WATCHDOG, TunableKind.KERNEL_THREAD})
_QUEUES: Final = frozenset({TunableKind.RPS, TunableKind.XPS})


def full_goals(
    topology: HostTopology, state: QuietState, seen: Iterable[Observed]
) -> dict[TunableKey, Goal]:
    """Return how each tunable must be, none for those that may be as they are."""
    if not state.full:
        return {}
    keep_off = KeepOff(state.full, topology.online, (state.housekeeping,))
    take_out = TakeOut(state.full)
    goals: dict[TunableKey, Goal] = {}
    for one in seen:
        if one.key.kind in _LISTS:
            goals[one.key] = keep_off
        elif one.key.kind in _QUEUES:
            goals[one.key] = take_out
    return goals


# Idle states and frequency of exclusive pCPUs: what is wanted, and why it is not so.
#
# The setting covers pCPUs that are quiet in full; a pod's annotations cover all of its exclusive
# pCPUs and win over it. A governor belongs to a frequency policy, so it is set only where every
# pCPU of the policy wants the same one.

Policies = Mapping[str, FrequencyPolicy]
"""The node's frequency policies by number."""


def idle_value(limit_us: int) -> str:
    """Return what pm_qos_resume_latency_us takes for a setting."""
    return str(limit_us) if limit_us else LEAVE


def wanted_power(
    state: QuietState, claims: Iterable[QuietClaim], idle: str, governor: str
) -> PowerGoals:
    """Return what each pCPU should have; `idle` and `governor` are the settings, maybe LEAVE."""
    limits = dict.fromkeys(state.full, idle)
    governors = dict.fromkeys(state.full, governor)
    for one in claims:
        if one.idle:
            limits |= dict.fromkeys(one.own, LEAVE if one.crio_power else one.idle)
        if one.governor:
            governors |= dict.fromkeys(one.own, LEAVE if one.crio_power else one.governor)
    return PowerGoals(limits, governors)


def power_goals(
    seen: Iterable[Observed], wanted: PowerGoals, policies: Policies
) -> Iterator[tuple[TunableKey, Goal]]:
    """Yield how each file must be, none for those that may be as they are."""
    for one in seen:
        kind, name = one.key
        if kind is TunableKind.IDLE_LIMIT:
            limit = wanted.idle.get(int(name), LEAVE)
            if limit != LEAVE:
                yield one.key, Exactly(limit)
        elif kind is TunableKind.GOVERNOR:
            policy = policies.get(name)
            asked = _agreed(policy, wanted) if policy is not None else LEAVE
            if policy is not None and asked in policy.available:
                yield one.key, Exactly(asked)


def _agreed(policy: FrequencyPolicy, wanted: PowerGoals) -> str:
    """Return the governor that all pCPUs of a policy want, LEAVE if there is none."""
    asked = {wanted.governors.get(cpu, LEAVE) for cpu in policy.cpus}
    return asked.pop() if len(asked) == 1 else LEAVE


def idle_limits(seen: Iterable[Observed]) -> dict[int, str]:
    """Return the limits of idle states by pCPU."""
    return {int(one.key.name): one.value for one in seen if one.key.kind is TunableKind.IDLE_LIMIT}


def power_problems(
    claim: QuietClaim, limits: Mapping[int, str], wanted: PowerGoals, policies: Policies
) -> Iterator[str]:
    """Yield why pCPUs of a sandbox do not have what its annotations, or the settings, ask for.

    `limits` are those of idle states now.
    """
    if claim.idle and not limits:
        yield f"annotation {C_STATES_KEY}: no limits of idle states (pm_qos) on this node"
    elif claim.idle and claim.crio_power:
        yield from _not_set_by_crio(
            f"annotation {C_STATES_KEY}: CRI-O sets pm_qos_resume_latency_us to {claim.idle}",
            {cpu: limits[cpu] for cpu in claim.own if cpu in limits},
            claim.idle,
        )
    yield from _governor_problems(claim, wanted, policies)


def _governor_problems(claim: QuietClaim, wanted: PowerGoals, policies: Policies) -> Iterator[str]:
    asked = f"annotation {GOVERNOR_KEY}: " if claim.governor else ""
    cpus = claim.own if claim.governor else claim.full
    mine = [one for one in policies.values() if one.cpus & cpus]
    if claim.governor and not mine:
        yield f"{asked}no frequency control (cpufreq) on this node"
        return
    if claim.governor and claim.crio_power:
        values = {cpu: one.governor for one in mine for cpu in one.cpus & cpus}
        does = f"{asked}CRI-O sets the governor to {claim.governor}"
        yield from _not_set_by_crio(does, values, claim.governor)
        return
    refused: dict[str, CpuSet] = {}
    for one in mine:
        governor = next(wanted.governors.get(cpu, LEAVE) for cpu in one.cpus & cpus)
        if governor == LEAVE:
            continue
        if governor not in one.available:
            known = ", ".join(sorted(one.available)) or "none"
            why = f"{asked}no governor {governor!r}; available: {known}"
        elif _agreed(one, wanted) == LEAVE:
            why = (
                f"{asked}governor {governor} not set: their frequency policy also covers "
                f"pCPUs {one.cpus - cpus or one.cpus} of others"
            )
        else:
            continue
        refused[why] = refused.get(why, CpuSet()) | one.cpus & cpus
    for why, which in refused.items():
        yield f"pCPUs {which}: {why}"


def _not_set_by_crio(does: str, values: Mapping[int, str], wanted: str) -> Iterator[str]:
    """Yield what is there instead of what CRI-O should have set."""
    others: dict[str, list[int]] = {}
    for cpu, value in values.items():
        if value != wanted:
            others.setdefault(value, []).append(cpu)
    for value, cpus in others.items():
        yield f"{does}, but pCPUs {CpuSet(cpus)} have {value}"
