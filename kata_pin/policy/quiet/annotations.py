"""What a pod asks for by annotation, and what it gets: never more than the setting `quiet` (D17).

`cpu-quiet.kata-pin.io: off|irq|full` wins over CRI-O's `irq-load-balancing.crio.io[/CONTAINER]`:
`disable` (or `true`, its old name) and `housekeeping`, which leaves the container's first pCPU and
that one's siblings to interrupts. `cpu-c-states.crio.io` and `cpu-freq-governor.crio.io` are for
all exclusive pCPUs of a pod. Values of CRI-O's: cri-o, internal/runtimehandlerhooks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.settings import AllowRule, QuietLevel, QuietPods
from kata_pin.model.topology import HostTopology

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


@dataclass(frozen=True, slots=True)
class QuietWish:
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


@dataclass(frozen=True, slots=True)
class PowerWish:
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


def is_allowed(rules: Iterable[AllowRule], namespace: str, handler: str) -> bool:
    """Return whether a rule lets pods of this namespace and runtime handler choose."""
    return any(rule.matches(namespace, handler) for rule in rules)


def quiet_part(cpus: CpuSet, topology: HostTopology, found: QuietWish) -> CpuSet:
    """Return which of a container's pCPUs are to be quiet."""
    if not found.level.acts or not cpus:
        return EMPTY
    if not found.housekeeping:
        return cpus
    return cpus - topology.siblings(cpus.first) - CpuSet([cpus.first])
