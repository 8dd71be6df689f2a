"""What a pod asks for by annotation, and what it gets: never more than the setting `quiet` (D17).

`cpu-quiet.kata-pin.io: off|irq|full` wins over CRI-O's `irq-load-balancing.crio.io[/CONTAINER]`:
`disable` (or `true`, its old name) and `housekeeping`, which leaves the container's first pCPU and
that one's siblings to interrupts (cri-o, internal/runtimehandlerhooks).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.settings import AllowRule, QuietLevel, QuietPods
from kata_pin.model.topology import HostTopology

QUIET_KEY: Final = "cpu-quiet.kata-pin.io"
CRIO_KEY: Final = "irq-load-balancing.crio.io"

_OWN: Final = {"off": QuietLevel.OFF, "irq": QuietLevel.IRQ, "full": QuietLevel.FULL}
_CRIO: Final = {
    **dict.fromkeys(("disable", "true", "housekeeping"), QuietLevel.IRQ),
    "enable": QuietLevel.OFF,
}


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
        return QuietWish(default, problem=f"annotation {key}: unknown value {value[:40]!r}")
    if not allowed:
        return QuietWish(default, problem=f"annotation {key} ignored: no rule of alloc.allow")
    chosen = min(asked, level, key=lambda one: one.rank)
    problem = f"annotation {key}: {asked} is more than quiet: {level}" if chosen != asked else ""
    crio = key != QUIET_KEY and chosen.acts
    return QuietWish(chosen, crio and value == "housekeeping", crio, problem)


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
