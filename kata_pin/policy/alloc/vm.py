"""The VM of a Kata pod in the accounting: its vCPUs and overhead threads.

Kata's Go runtime gives a VM ceil(default_vcpus + sum of its containers' CPU limits) vCPUs
(virtcontainers/sandbox.go, updateResources), so there are usually more vCPUs than exclusive CPUs.
The unpaired vCPUs and every thread that is not a vCPU need CPUs too: the VM's own, the housekeeping
pool's, or the shared pool's. Pure. Out of scope: which thread goes where (policy/placement).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kata_pin.model.alloc import AllocState, ContainerRequest, Grant, GrantKind, PodRequest
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.settings import AllocSettings, CpuClass


def vcpus(members: Sequence[Grant], default_vcpus: int) -> int:
    """Return how many vCPUs Kata gives the VM of these containers."""
    millis = sum(one.request.limit_millis for one in members)
    return default_vcpus - (-millis // 1000)


def overhead_millis(pod: PodRequest, settings: AllocSettings) -> int:
    """Return the CPU of a VM's overhead in thousandths: the pod's, else the setting."""
    return pod.overhead_millis or settings.vm.overhead_millis


def shared_floor(state: AllocState, settings: AllocSettings, minimum: int) -> int:
    """Return how many CPUs the shared pool needs: its minimum, or what the VMs in it need.

    VMs with their own CPUs need none of it, nor do any if there is a housekeeping pool.
    """
    if state.housekeeping:
        return minimum
    millis = sum(
        overhead_millis(grant.request.pod, settings)
        for grant in state.grants.values()
        if grant.kind is GrantKind.SANDBOX and not grant.exclusive
    )
    return max(minimum, -(-millis // 1000))


def vm_grant(
    members: Sequence[Grant],
    settings: AllocSettings,
    *,
    own: CpuSet,
    zone: CpuSet,
    old: Grant | None,
) -> Grant:
    """Return the grant of the VM of these containers (at least one); `old` if it is the same.

    Its CPUs are its own, or those of the pool that it follows, near the containers if possible.
    """
    pod = members[0].request.pod
    grant = Grant(
        ContainerRequest(pod.sandbox_id, pod, cpu_millis=overhead_millis(pod, settings)),
        members[0].policy,
        CpuClass.EXCLUSIVE if own else CpuClass.NONE,
        exclusive=own,
        shared=None if own else EMPTY,
        zone=EMPTY if own else zone,
        kind=GrantKind.SANDBOX,
        reasons=(_balance(members, own, settings),),
    )
    if old is not None and not own and old.shared is not None:
        grant = replace(grant, shared=old.shared)
    return old if old == grant else grant


def _balance(members: Sequence[Grant], own: CpuSet, settings: AllocSettings) -> str:
    exclusive = sum(len(one.exclusive) for one in members)
    count = vcpus(members, settings.vm.default_vcpus)
    if own:
        place = f"{own}, its own"
    else:
        place = "the housekeeping pool" if settings.housekeeping else "the shared pool"
    if not exclusive:
        return f"its VM has {_count(count, 'vCPU')}; the overhead threads run on {place}"
    return (
        f"its VM has {_count(count, 'vCPU')} and {_count(exclusive, 'exclusive CPU')}; the "
        f"unpaired vCPUs ({max(0, count - exclusive)}) and the overhead threads run on {place}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
