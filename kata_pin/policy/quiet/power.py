"""Idle states and frequency of exclusive pCPUs: what is wanted, and why it is not so. Pure.

The setting covers pCPUs that are quiet in full; a pod's annotations cover all of its exclusive
pCPUs and win over it. A governor belongs to a frequency policy, so it is set only where every pCPU
of the policy wants the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.quiet.node import FrequencyPolicy
from kata_pin.model.quiet.tunables import (
    LEAVE,
    Exactly,
    Goal,
    Observed,
    PowerGoals,
    QuietClaim,
    QuietState,
    TunableKey,
    TunableKind,
)
from kata_pin.policy.quiet.annotations import C_STATES_KEY, GOVERNOR_KEY

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
