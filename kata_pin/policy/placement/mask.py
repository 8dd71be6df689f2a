"""The sandbox mask: which CPUs the containers of a sandbox have together (D8).

Computed in each pass from the recorded containers; one that ended no longer counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.node import Node
from kata_pin.model.placement import SandboxMask
from kata_pin.model.sandbox import Container, ContainerKind, ContainerState, Sandbox
from kata_pin.policy.placement.exclusive import claims


def sandbox_mask(
    sandbox: Sandbox,
    node: Node,
    *,
    allocated: Mapping[str, CpuSet] | None = None,
    pool: CpuSet = EMPTY,
    kept: CpuSet = EMPTY,
) -> SandboxMask:
    """Return the sandbox mask and its parts.

    The mask is the union over counting containers that have a cpuset; without any, the kubelet's
    default set where its checkpoint says static, else `pool` (the shared pool of our own
    allocator), else the pod sandbox's own cpuset, else None. `exclusive` and `shared` split it;
    `overhead_extra` is what the pod sandbox's own cpuset adds for overhead and surplus vCPUs.
    `allocated` and `pool` come from our own allocator and are absent without it; `kept` are the
    CPUs of the last pass's pairs.
    """
    counting = counted(sandbox, node)
    found = claims(counting, node, sandbox.handler, allocated=allocated, kept=kept)
    containers = _union_of(counting, ContainerKind.CONTAINER)
    pause = _union_of(counting, ContainerKind.SANDBOX)
    mask, origin = _mask_and_origin(containers, pause, node, pool)
    if mask is None:
        return SandboxMask(mask=None, origin=origin, claims=found)
    exclusive = union(claim.exclusive for claim in found)
    return SandboxMask(
        mask=mask,
        exclusive=exclusive,
        shared=mask - exclusive,
        overhead_extra=pause - mask,
        origin=origin,
        claims=found,
    )


def counted(sandbox: Sandbox, node: Node) -> tuple[Container, ...]:
    """Return the containers that count: created or running, by `stopped_counts` stopped too."""
    late = node.settings.stopped_counts
    return tuple(
        one
        for one in sandbox.containers
        if one.state.counts or (late and one.state is ContainerState.STOPPED)
    )


def _union_of(containers: tuple[Container, ...], kind: ContainerKind) -> CpuSet:
    return union(one.cpus or EMPTY for one in containers if one.kind is kind)


def _mask_and_origin(
    containers: CpuSet, pause: CpuSet, node: Node, pool: CpuSet
) -> tuple[CpuSet | None, str]:
    if containers:
        return containers, "union of the containers' cpusets"
    if node.kubelet is not None and node.kubelet.static and node.kubelet.default:
        return node.kubelet.default, "kubelet's default set (no container has a cpuset)"
    if pool:
        return pool, "allocator's shared pool (no container has a cpuset)"
    if pause:
        return pause, "pod sandbox's own cpuset (no container has one)"
    return None, "no container has a cpuset"
