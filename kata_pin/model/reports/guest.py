"""The guest of a sandbox: which vCPU is which guest CPU, and which of them containers use."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import Cpus


@dataclass(frozen=True, slots=True)
class GuestLink:
    """How well one link from a thread to its guest CPU is known."""

    state: str  #: One of `measured` (read in this boot), `proven`, `inferred`, `unknown`
    source: str  #: the evidence


@dataclass(frozen=True, slots=True)
class GuestLinks:
    """The links from a vCPU thread to its guest CPU."""

    vcpu: GuestLink  #: from the thread to the cpu-index
    apic_id: GuestLink  #: from the cpu-index to the APIC id
    guest_cpu: GuestLink  #: from the APIC id to the guest CPU


@dataclass(frozen=True, slots=True)
class GuestVcpu:
    """One vCPU thread and its guest CPU."""

    tid: int  #: thread id
    vcpu: int | None  #: the VMM's cpu-index; null: unknown
    apic_id: int | None  #: its APIC id; null: unknown, or the machine has none
    guest_cpu: int | None  #: the CPU number in the guest's Linux; null: unknown
    state: str  #: One of `measured`, `proven`, `inferred`, `unknown`: that of the weakest link
    source: str  #: the evidence of the weakest link
    links: GuestLinks  #: each link from the thread to the guest CPU
    cpus: Cpus  #: pCPUs that it should run on
    paired: bool  #: whether these are exclusive pCPUs of its container
    container: str  #: id of the container that owns it; empty: none


@dataclass(frozen=True, slots=True)
class GuestContainer:
    """The guest CPUs of one container."""

    id: str  #: container id
    name: str  #: container name
    cpus: Cpus | None  #: guest CPUs that it should use; null: any
    owned: bool  #: whether its own vCPUs provide them
    reason: str  #: why these, or why any
    applied: Cpus | None  #: the cpuset that was sent to the guest; null: none
    #: One of `read` (read back), `fits` (used CPU time does not contradict it), `none`,
    #: `broken` (not in force), `refused` (by kata-agent); null: nothing was sent
    proof: str | None
    detail: str  #: what went wrong


@dataclass(frozen=True, slots=True)
class Guest:
    """The map from vCPU threads to guest CPUs, and the cpusets in the guest."""

    #: One of `off` (disabled, or no daemon runs), `idle` (nothing to apply), `pending`, `applied`,
    #: `denied` (by the guest's policy), `unreachable`, `failed` (a cpuset is not in force)
    state: str
    detail: str  #: the reason in words
    answered_s: float | None  #: age of the guest's last answer; null: it never answered
    kernel: str  #: release of the guest's kernel; empty: unknown
    kernel_source: str  #: where the release comes from, or why it is unknown
    hotplugged: bool | None  #: whether a vCPU was added after the VM's start; null: unknown
    vcpus: tuple[GuestVcpu, ...]  #: one object per vCPU thread
    containers: tuple[GuestContainer, ...]  #: the pod's containers without its pod sandbox
