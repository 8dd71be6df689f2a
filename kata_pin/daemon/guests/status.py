"""What is decided about a sandbox's guest, and what is known of the guest since."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Final

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.guest_map import GuestCpuset, GuestFacts, GuestMap
from kata_pin.model.node import Node
from kata_pin.model.placement import Report
from kata_pin.model.sandbox import Sandbox
from kata_pin.policy.guest.cpus import guest_cpusets
from kata_pin.policy.guest.map import NOTHING_KNOWN, guest_map
from kata_pin.wire.qemu import apic

_X86: Final = frozenset({"x86_64", "i686"})


class Goal(Enum):
    """What is wanted of a guest."""

    KEEP = auto()  # containers on their own vCPUs
    GIVE_BACK = auto()  # on all guest CPUs, if they were confined
    LEAVE = auto()  # nothing is sent


class GuestState(StrEnum):
    """The state of guest pinning in a sandbox."""

    OFF = "off"  # by setting, or because nothing is set at all
    IDLE = "idle"  # nothing to send
    PENDING = "pending"  # to be sent, perhaps again
    APPLIED = "applied"
    DENIED = "denied"  # not permitted by the guest's policy
    UNREACHABLE = "unreachable"
    FAILED = "failed"  # some container is not on its assigned guest CPUs


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
    """The cpuset that was sent for a container, and what is known of it since."""

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
