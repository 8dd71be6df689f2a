"""Which guest CPUs each container of a sandbox should use, and the order of the changes (D12).

A container with exclusive CPUs gets the guest CPUs of the vCPUs that are paired with them. The
others get the vCPUs that no container owns. If nothing is left for a container, or the guest CPU of
one of its own vCPUs is not known well enough, it is unrestricted: it must never lose CPUs that it
was given. A vCPU whose guest CPU is unknown is in no set. Pause containers get no cpuset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.guest_map import GuestCpuset, GuestMap
from kata_pin.model.node import Node
from kata_pin.model.placement import Placement
from kata_pin.model.sandbox import Container, ContainerKind, Sandbox
from kata_pin.policy.placement.mask import counted

NO_VCPUS: Final = "no container of this sandbox has its own vCPUs"


def guest_cpusets(
    sandbox: Sandbox,
    node: Node,
    placement: Placement,
    found: GuestMap,
    *,
    inferred: bool = False,
) -> tuple[GuestCpuset, ...]:
    """Return one decision per counting container, in record order.

    `inferred` says whether guest CPUs that are only inferred may be used.
    """
    containers = [one for one in counted(sandbox, node) if one.kind is ContainerKind.CONTAINER]
    exclusive = {claim.container_id for claim in placement.mask.claims if claim.exclusive}
    shares = _Shares.of(found, inferred=inferred)
    return tuple(shares.decide(one, exclusive=one.id in exclusive) for one in containers)


@dataclass(frozen=True)
class _Shares:
    """By owner: the usable guest CPUs, and the number of vCPUs without one (`unusable`)."""

    own: Mapping[str, CpuSet]
    unusable: Mapping[str, int]

    @classmethod
    def of(cls, found: GuestMap, *, inferred: bool) -> _Shares:
        usable = found.usable(inferred=inferred)
        own: dict[str, CpuSet] = {}
        unusable: dict[str, int] = {}
        for one in found.links:
            owner = one.container_id
            if one.key in usable:
                own[owner] = own.get(owner, EMPTY) | CpuSet((usable[one.key],))
            else:
                unusable[owner] = unusable.get(owner, 0) + 1
        return cls(own, unusable)

    @property
    def owned(self) -> bool:
        """Whether any container has vCPUs of its own."""
        return any(owner for owner in (*self.own, *self.unusable))

    def decide(self, container: Container, *, exclusive: bool) -> GuestCpuset:
        name = container.id
        if not self.owned:
            return GuestCpuset(name, None, NO_VCPUS)
        unusable = self.unusable.get(name, 0)
        if unusable:
            why = f"the guest CPU of {unusable} of its own vCPUs is not known well enough"
            return GuestCpuset(name, None, why)
        if name in self.own:
            return GuestCpuset(name, self.own[name], "guest CPUs of its own vCPUs", owned=True)
        left = self.own.get("", EMPTY)
        if left:
            why = "guest CPUs of vCPUs that no container owns"
            return GuestCpuset(
                name, left, f"no vCPU is paired with its CPUs: {why}" if exclusive else why
            )
        return GuestCpuset(name, None, self._nothing_left())

    def _nothing_left(self) -> str:
        if self.unusable.get(""):
            return "the guest CPUs of the vCPUs that no container owns are not known well enough"
        return "all vCPUs belong to other containers"


@dataclass(frozen=True)
class GuestSteps:
    """The cpusets to send to a guest: `widen` before a change on the host, `narrow` after it."""

    widen: Mapping[str, CpuSet] = field(default_factory=dict)
    narrow: Mapping[str, CpuSet] = field(default_factory=dict)


def guest_steps(
    applied: Mapping[str, CpuSet], wanted: Iterable[GuestCpuset], every: CpuSet | None
) -> GuestSteps:
    """Return what to send so that no container lacks its CPUs before, during or after the change.

    `applied` is what we have set, by container. A container that needs other guest CPUs gets them
    beside its old ones before vCPUs are moved, and only the new ones afterwards. An unrestricted
    one gets nothing, unless we restricted it before: then it gets `every` guest CPU, because the
    agent ignores an empty cpuset.
    """
    targets: dict[str, CpuSet] = {}
    for one in wanted:
        if one.cpus is not None:
            targets[one.container_id] = one.cpus
        elif one.container_id in applied and every:
            targets[one.container_id] = every
    widen = {
        name: union((applied[name], cpus))
        for name, cpus in targets.items()
        if name in applied and not cpus <= applied[name]
    }
    return GuestSteps(widen, targets)
