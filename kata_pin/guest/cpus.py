"""Which guest CPUs each container of a sandbox should use, and why (D12).

What is known of the guest since is kept here too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Final

from msgspec import Struct, field

from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.placement import Node, Placement, Report
from kata_pin.base.sandbox import (
    Container,
    GuestCpuset,
    GuestFacts,
    GuestMap,
    Link,
    Sandbox,
    VcpuLink,
)
from kata_pin.base.values import ContainerKind, GuestState, Proof
from kata_pin.guest.map import NOTHING_KNOWN, guest_map
from kata_pin.peers import qemu
from kata_pin.placement.masks import counted

# A container with exclusive CPUs gets the guest CPUs of the vCPUs that are paired with them. The
# others get the vCPUs that no container owns. If nothing is left for a container, or the guest CPU
# of one of its own vCPUs is not known well enough, it is unrestricted: it must never lose CPUs that
# it was given. A vCPU whose guest CPU is unknown is in no set. Pause containers get no cpuset.

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


class _Shares(Struct, frozen=True):
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


class GuestSteps(Struct, frozen=True):
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


# What is decided about a sandbox's guest, and what is known of the guest since.

_X86: Final = frozenset({"x86_64", "i686"})


class GuestGoal(Enum):
    """What is wanted of a guest."""

    KEEP = auto()  # containers on their own vCPUs
    GIVE_BACK = auto()  # on all guest CPUs, if they were confined
    LEAVE = auto()  # nothing is sent


class GuestPlan(Struct, frozen=True):
    """The map as of a pass, and which guest CPUs each container should use.

    `possible` are all guest CPUs that there may ever be.
    """

    map: GuestMap
    cpusets: tuple[GuestCpuset, ...] = ()
    possible: CpuSet = EMPTY


class Sent(Struct, frozen=True):
    """The cpuset that was sent for a container, and what is known of it since."""

    cpus: CpuSet
    proof: Proof = Proof.NONE
    detail: str = ""


class GuestView(Struct, frozen=True):
    """All that is known of a guest; `asked_s` is the age of the last answer, None without one."""

    plan: GuestPlan
    state: GuestState = GuestState.OFF
    detail: str = ""
    asked_s: float | None = None
    sent: Mapping[str, Sent] = field(default_factory=dict)


def plan_guest(
    sandbox: Sandbox,
    report: Report,
    node: Node,
    facts: GuestFacts = NOTHING_KNOWN,
    *,
    inferred: bool = False,
    machine: str = "",
) -> GuestPlan | None:
    """Return what a pass means for the guest; None where it found no VMM.

    `inferred` lets inferred links be acted on. `machine` is uname's, this host's by default.
    """
    if sandbox.vmm is None or report.placement is None:
        return None
    x86 = (machine or os.uname().machine) in _X86
    found = guest_map(
        sandbox, report.threads, report.placement, facts, apic_of=qemu.apic_id if x86 else None
    )
    cpusets = guest_cpusets(sandbox, node, report.placement, found, inferred=inferred)
    return GuestPlan(found, cpusets, CpuSet(range(sandbox.vmm.guest.maximum)))


# Which guest CPU each vCPU is, which ones each container uses, and why: lines for `explain`.

_PLUGGED: Final = {
    True: "some vCPUs were hotplugged",
    False: "no vCPU was hotplugged",
    None: "the number of vCPUs at boot is unknown",
}


def guest_lines(sandbox: Sandbox, found: GuestMap, cpusets: Iterable[GuestCpuset]) -> Iterator[str]:
    """Yield the guest's kernel, one line per vCPU with its links, one line per container."""
    yield _kernel(found)
    titles = {one.id: one.title for one in sandbox.containers}
    for one in found.links:
        yield _vcpu(one, titles)
    for cpuset in cpusets:
        title = titles.get(cpuset.container_id, cpuset.container_id)
        where = "all guest CPUs" if cpuset.cpus is None else f"guest CPUs {cpuset.cpus}"
        yield f"{title}: {where}: {cpuset.reason}"


def _kernel(found: GuestMap) -> str:
    facts = found.facts
    plugged = _PLUGGED[found.hotplugged]
    source = f" ({facts.source})" if facts.source else ""
    return f"guest kernel: {facts.release or 'unknown'}{source}; {plugged}"


def _vcpu(one: VcpuLink, titles: dict[str, str]) -> str:
    steps = [f"tid {one.key.tid} {_how(one.thread_link)}"]
    if one.apic_id is not None:
        steps.append(f"APIC id {one.apic_id} {_how(one.apic_link)}")
    steps.append(f"number {_how(one.guest_link)}")
    index = "?" if one.index is None else one.index
    number = "?" if one.guest_cpu is None else one.guest_cpu
    owner = titles.get(one.container_id, one.container_id) or "no container"
    return f"vCPU {index} ({owner}) is guest CPU {number}, {one.state}: {', '.join(steps)}"


def _how(link: Link) -> str:
    return f"({link.state}: {link.source})"
