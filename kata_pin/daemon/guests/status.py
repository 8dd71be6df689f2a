"""What is decided about a sandbox's guest, and what documents say of it (docs/json.md).

A GuestPlan is made from a pass and what is known of the guest; pure. A GuestView adds what became
of it in the guest: nothing without a daemon, which alone talks to guests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.guestmap import GuestCpuset, GuestFacts, GuestMap, VcpuLink
from kata_pin.model.node import Node
from kata_pin.model.placement import Report
from kata_pin.model.sandbox import Sandbox
from kata_pin.policy.guest.cpus import guest_cpusets
from kata_pin.policy.guest.map import NOTHING_KNOWN, guest_map
from kata_pin.wire.qemu import apic

Json = dict[str, Any]

_X86: Final = frozenset({"x86_64", "i686"})


class GuestState(StrEnum):
    """How guest pinning stands in a sandbox."""

    OFF = "off"  # by setting, or because nothing is set at all
    IDLE = "idle"  # there is nothing to tell the guest
    PENDING = "pending"  # to be told, or told again
    TOLD = "told"
    DENIED = "denied"  # not permitted by the guest's policy
    UNREACHABLE = "unreachable"
    FAILED = "failed"  # some container's cpuset is not what it was told


class Proof(StrEnum):
    """What is known of a cpuset that a guest reported as set."""

    NONE = "none"  # a success is no proof
    READ = "read"  # read back
    FITS = "fits"  # the CPU time used does not speak against it
    BROKEN = "broken"  # read back, or measured, as another one
    REFUSED = "refused"  # the agent refused


@dataclass(frozen=True)
class GuestPlan:
    """The map as of a pass, and which guest CPUs each container should use.

    `possible` are all guest CPUs that there may ever be.
    """

    map: GuestMap
    cpusets: tuple[GuestCpuset, ...] = ()
    possible: CpuSet = EMPTY


@dataclass(frozen=True)
class Sent:
    """What a guest was told of a container, and what is known of it since."""

    cpus: CpuSet
    proof: Proof = Proof.NONE
    detail: str = ""


@dataclass(frozen=True)
class GuestView:
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
        sandbox, report.threads, report.placement, facts, apic_of=apic.apic_id if x86 else None
    )
    cpusets = guest_cpusets(sandbox, node, report.placement, found, inferred=inferred)
    return GuestPlan(found, cpusets, CpuSet(range(sandbox.vmm.guest.maximum)))


def guest_document(view: GuestView | None, sandbox: Sandbox) -> Json | None:
    """Return the `guest` of a sandbox in the state document."""
    if view is None:
        return None
    names = {one.id: one.title for one in sandbox.containers}
    found = view.plan.map
    return {
        "state": view.state.value,
        "detail": view.detail,
        "asked_s": None if view.asked_s is None else round(max(0.0, view.asked_s), 3),
        "kernel": found.facts.release,
        "kernel_source": found.facts.source,
        "hotplugged": found.hotplugged,
        "vcpus": [_vcpu(one) for one in found.links],
        "containers": [
            _container(one, names.get(one.container_id, one.container_id), view.sent)
            for one in view.plan.cpusets
        ],
    }


def _vcpu(one: VcpuLink) -> Json:
    return {
        "tid": one.key.tid,
        "vcpu": one.index,
        "apic_id": one.apic_id,
        "guest_cpu": one.guest_cpu,
        "state": one.state.value,
        "source": one.weakest.source,
        "links": {
            name: {"state": link.state.value, "source": link.source}
            for name, link in (
                ("vcpu", one.thread_link),
                ("apic_id", one.apic_link),
                ("guest_cpu", one.guest_link),
            )
        },
        "cpus": str(one.cpus),
        "paired": one.paired,
        "container": one.container_id,
    }


def _container(one: GuestCpuset, name: str, sent: Mapping[str, Sent]) -> Json:
    told = sent.get(one.container_id)
    return {
        "id": one.container_id,
        "name": name,
        "cpus": None if one.cpus is None else str(one.cpus),
        "owned": one.owned,
        "reason": one.reason,
        "told": None if told is None else str(told.cpus),
        "proof": None if told is None else told.proof.value,
        "detail": "" if told is None else told.detail,
    }
