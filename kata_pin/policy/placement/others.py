"""The CPUs that other pods hold exclusively: no thread of this sandbox is to run there (D28).

A checkpoint of the kubelet gives CPUs to a pod seconds before its reconcile takes them out of the
cpusets of the others (every 10 s by default: cpu_manager_reconcile_period). So a pass goes by the
checkpoint, not by what the cgroups still allow. The same holds for DRA claims: their driver narrows
the others when the next container is created.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.node import KubeletState, Node
from kata_pin.model.placement import Claim, SandboxMask
from kata_pin.model.sandbox import Container


def held_by_others(
    containers: Iterable[Container],
    claims: Iterable[Claim],
    node: Node,
    allocated: CpuSet,
) -> CpuSet:
    """Return the CPUs that are exclusively other pods'.

    `containers` and `claims` are those of this sandbox; `allocated` is what our own allocator gave
    to other sandboxes. What this sandbox has itself is not in it, whoever else has it too.
    """
    every = tuple(containers)
    given = entries_of_others(every, node.kubelet) | claims_of_others(every, node.claims)
    return (allocated | given) - union(one.exclusive for one in claims)


def without(mask: SandboxMask, taken: CpuSet) -> SandboxMask:
    """Return the mask without these CPUs; where it has no others it keeps them (D7)."""
    left = (mask.mask or EMPTY) - taken
    if not left:
        return mask
    return replace(
        mask, mask=left, shared=mask.shared - taken, overhead_extra=mask.overhead_extra - taken
    )


def claims_of(container: Container, claims: Mapping[str, CpuSet]) -> frozenset[str]:
    """Return the uids of a container's DRA claims: its cpuset is exactly their CPUs.

    The driver sets it so. A shared container's cpuset may still have the CPUs of new claims, but it
    has others too: the driver grants no claim that would leave the shared pool without CPUs.
    """
    cpus = container.cpus or EMPTY
    mine = frozenset(uid for uid, of in claims.items() if of <= cpus)
    return mine if cpus == union(claims[uid] for uid in mine) else frozenset()


def claims_of_others(containers: Iterable[Container], claims: Mapping[str, CpuSet]) -> CpuSet:
    """Return the CPUs of all DRA claims but those of these containers."""
    if not claims:
        return EMPTY
    mine = {uid for one in containers for uid in claims_of(one, claims)}
    return union(cpus for uid, cpus in claims.items() if uid not in mine)


def entries_of_others(containers: Iterable[Container], kubelet: KubeletState | None) -> CpuSet:
    """Return the checkpoint's entries of other pods, without CPUs that its own pod has as well.

    A sandbox without a known pod uid may own any entry, so none is taken from it.
    """
    own = {one.pod_uid for one in containers} - {""}
    if kubelet is None or not kubelet.static or not own:
        return EMPTY
    mine = theirs = EMPTY
    for uid in kubelet.entries.keys() | kubelet.pod_entries.keys():
        cpus = union(kubelet.entries.get(uid, {}).values()) | kubelet.pod_entries.get(uid, EMPTY)
        if uid in own:
            mine |= cpus
        else:
            theirs |= cpus
    return theirs - mine
