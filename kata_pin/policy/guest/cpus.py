"""Which guest CPUs each container of a sandbox should use, and in which order to say so (D12).

A container with exclusive CPUs gets the guest CPUs of the vCPUs that are paired with them. The
others get those of vCPUs that are nobody's, never a vCPU of another container. Where nothing is
left for a container, or the guest CPU of one of its own vCPUs may not be acted on, it is
unrestricted, and the reason says so: a container is never cut off from CPUs it was given. A vCPU
whose link is unknown appears in no set. The pause container is never told anything.

Pure. Out of scope: the map (guestmap.py), talking to the guest (guest/), what a guest already has
(daemon/).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.guestmap import GuestCpuset, GuestMap
from kata_pin.model.node import Node
from kata_pin.model.placement import Placement
from kata_pin.model.sandbox import Container, ContainerKind, Sandbox
from kata_pin.policy.placement.mask import counted

NO_VCPUS: Final = "no container of the sandbox has vCPUs of its own"


def guest_cpusets(
    sandbox: Sandbox,
    node: Node,
    placement: Placement,
    found: GuestMap,
    *,
    inferred: bool = False,
) -> tuple[GuestCpuset, ...]:
    """Return one decision a counting container, in record order; `inferred` links count if so."""
    containers = [one for one in counted(sandbox, node) if one.kind is ContainerKind.CONTAINER]
    exclusive = {claim.container_id for claim in placement.mask.claims if claim.exclusive}
    shares = _Shares.of(found, inferred=inferred)
    return tuple(shares.decide(one, exclusive=one.id in exclusive) for one in containers)


@dataclass(frozen=True)
class _Shares:
    """The usable guest CPUs by owner; `hidden` counts vCPUs that may not be acted on, by owner."""

    own: Mapping[str, CpuSet]
    hidden: Mapping[str, int]

    @classmethod
    def of(cls, found: GuestMap, *, inferred: bool) -> _Shares:
        usable = found.usable(inferred=inferred)
        own: dict[str, CpuSet] = {}
        hidden: dict[str, int] = {}
        for one in found.links:
            owner = one.container_id
            if one.key in usable:
                own[owner] = own.get(owner, EMPTY) | CpuSet((usable[one.key],))
            else:
                hidden[owner] = hidden.get(owner, 0) + 1
        return cls(own, hidden)

    @property
    def owned(self) -> bool:
        """Whether any container has vCPUs of its own."""
        return any(owner for owner in (*self.own, *self.hidden))

    def decide(self, container: Container, *, exclusive: bool) -> GuestCpuset:
        name = container.id
        if not self.owned:
            return GuestCpuset(name, None, NO_VCPUS)
        hidden = self.hidden.get(name, 0)
        if hidden:
            have = "has" if hidden == 1 else "have"
            why = f"{hidden} of its own vCPUs {have} no guest CPU that may be acted on"
            return GuestCpuset(name, None, why)
        if name in self.own:
            return GuestCpuset(name, self.own[name], "guest CPUs of its own vCPUs", owned=True)
        left = self.own.get("", EMPTY)
        if left:
            why = "guest CPUs of vCPUs that are no container's own"
            return GuestCpuset(
                name, left, f"no vCPU is paired with its CPUs: {why}" if exclusive else why
            )
        return GuestCpuset(name, None, self._nothing_left())

    def _nothing_left(self) -> str:
        if self.hidden.get(""):
            return "no vCPU that is no container's own has a guest CPU that may be acted on"
        return "every vCPU is another container's own"


@dataclass(frozen=True)
class GuestSteps:
    """What is sent to a guest around a change on the host: `widen` before, `narrow` after it."""

    widen: Mapping[str, CpuSet] = field(default_factory=dict)
    narrow: Mapping[str, CpuSet] = field(default_factory=dict)


def guest_steps(
    standing: Mapping[str, CpuSet], wanted: Iterable[GuestCpuset], every: CpuSet | None
) -> GuestSteps:
    """Return what to send so that no container is ever without the CPUs it has before or after.

    `standing` is what we have set, by container. Whoever must get guest CPUs that it does not have
    gets them beside its old ones before vCPUs are moved, and only the new ones afterwards. One that
    is to be unrestricted is told nothing, unless it was restricted by us: then it gets `every`
    guest CPU, for a cpuset can not be taken back (the agent ignores an empty one).
    """
    targets: dict[str, CpuSet] = {}
    for one in wanted:
        if one.cpus is not None:
            targets[one.container_id] = one.cpus
        elif one.container_id in standing and every:
            targets[one.container_id] = every
    widen = {
        name: union((standing[name], cpus))
        for name, cpus in targets.items()
        if name in standing and not cpus <= standing[name]
    }
    return GuestSteps(widen, targets)
