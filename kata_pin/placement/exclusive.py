"""Which CPUs are exclusively a container's own, or another pod's (D9, D28).

Pools of exclusive CPUs are cut into runs for pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.allocation import PERIOD_US, SHARES_PER_CPU
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.placement import Claim, KubeletState, Node, SandboxMask
from kata_pin.base.sandbox import Container
from kata_pin.base.settings import ExclusiveMode
from kata_pin.base.values import ContainerKind, Provenance, count

# The exclusive CPUs of a sandbox as pools, one a container, and how they are cut into runs.
#
# A run is what one vCPU is paired with: one pCPU when the VM has vCPUs enough, several of the same
# container otherwise (D10).


class Pool(NamedTuple):
    """The exclusive CPUs of one container, in topology order."""

    container_id: str
    cpus: tuple[int, ...]


class Run(NamedTuple):
    """The CPUs that one vCPU is paired with, and their container."""

    cpus: CpuSet
    container_id: str


class Pools(Struct, frozen=True):
    """What can be paired, in record order, and what was taken out before.

    `reserved` carries overhead (`reserve:k`), in the same order; `emptied` names containers that it
    left without any; `overlap` is claimed by two containers (the first in record order keeps it),
    `offline` is exclusive but off. `exclusive` counts what there was before the reserve was taken.
    """

    pools: tuple[Pool, ...]
    exclusive: int = 0
    reserved: tuple[int, ...] = ()
    emptied: tuple[str, ...] = ()
    overlap: CpuSet = EMPTY
    offline: CpuSet = EMPTY

    @property
    def size(self) -> int:
        """Return x of D10: how many pCPUs can be paired."""
        return sum(len(pool.cpus) for pool in self.pools)


def exclusive_pools(mask: SandboxMask, topology: HostTopology, reserve: int) -> Pools:
    """Return the pools of the sandbox after `reserve` CPUs were taken from the end.

    The order is that of pairing: container by container in record order, each in topology order.
    A CPU is in one pool only, whatever the claims say, and offline CPUs are in none.
    """
    taken = overlap = EMPTY
    pools: list[Pool] = []
    for claim in mask.claims:
        overlap |= claim.exclusive & taken
        own = (claim.exclusive - taken) & topology.online
        taken |= claim.exclusive
        if own:
            pools.append(Pool(claim.container_id, tuple(topology.in_order(own))))
    exclusive = [cpu for pool in pools for cpu in pool.cpus]
    reserved = tuple(exclusive[-reserve:]) if reserve > 0 else ()
    left = [
        pool._replace(cpus=tuple(cpu for cpu in pool.cpus if cpu not in reserved)) for pool in pools
    ]
    return Pools(
        pools=tuple(pool for pool in left if pool.cpus),
        exclusive=len(exclusive),
        reserved=reserved,
        emptied=tuple(pool.container_id for pool in left if not pool.cpus),
        overlap=overlap,
        offline=taken - topology.online,
    )


def runs(pools: Sequence[Pool], vcpus: int) -> list[Run]:
    """Cut the pools into at most `vcpus` runs, container by container.

    With enough vCPUs every run is one pCPU. Otherwise each pool is dealt over its share of vCPUs
    as runs that do not overlap and never cross a container. `vcpus` must not be less than the
    number of pools.
    """
    total = sum(len(pool.cpus) for pool in pools)
    if vcpus >= total:
        return [Run(CpuSet((cpu,)), pool.container_id) for pool in pools for cpu in pool.cpus]
    shares = apportion([len(pool.cpus) for pool in pools], vcpus)
    return [
        Run(cpus, pool.container_id)
        for pool, share in zip(pools, shares, strict=True)
        for cpus in _cut(pool.cpus, share)
    ]


def apportion(sizes: Sequence[int], vcpus: int) -> list[int]:
    """Share `vcpus` out over pools of these sizes: proportional, at least one each.

    Each gets max(1, floor(vcpus * size / total)); what is left goes to the largest remainders,
    ties in record order. Where the ones that were raised to 1 make too many, the largest share
    gives one back, the smallest remainder first, ties from the end. Needs
    len(sizes) <= vcpus < sum(sizes).
    """
    total = sum(sizes)
    remainders = [vcpus * size % total for size in sizes]
    shares = [max(1, vcpus * size // total) for size in sizes]
    order = range(len(sizes))
    left = vcpus - sum(shares)
    raised = [i for i in order if vcpus * sizes[i] < total]
    takers = sorted((i for i in order if i not in raised), key=lambda i: (-remainders[i], i))
    for i in takers[: max(0, left)]:
        shares[i] += 1
    for _ in range(-left):
        giver = max(order, key=lambda i: (shares[i], -remainders[i], i))
        shares[giver] -= 1
    return shares


def _cut(cpus: tuple[int, ...], parts: int) -> list[CpuSet]:
    """Cut into `parts` consecutive pieces, the longer ones first."""
    size, longer = divmod(len(cpus), parts)
    pieces: list[CpuSet] = []
    start = 0
    for part in range(parts):
        end = start + size + (part < longer)
        pieces.append(CpuSet(cpus[start:end]))
        start = end
    return pieces


# The CPUs that other pods hold exclusively: no thread of this sandbox is to run there (D28).
#
# A checkpoint of the kubelet gives CPUs to a pod seconds before its reconcile takes them out of the
# cpusets of the others (every 10 s by default: cpu_manager_reconcile_period). So a pass goes by the
# checkpoint, not by what the cgroups still allow. The same holds for DRA claims: their driver
# narrows the others when the next container is created.

UNCLAIMED: Final = "CPUs that no other pod has exclusively (no container has a cpuset)"


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


def unclaimed(mask: SandboxMask, node: Node, taken: CpuSet) -> SandboxMask:
    """Return the mask of a sandbox without a cpuset: all CPUs but those of other pods.

    A VM that boots has none, nor has one of a pod without requests; their cgroups allow all CPUs.
    Where others have nothing, or everything, it has no mask.
    """
    left = (node.release_mask or node.topology.online) - taken
    if mask.mask is not None or not taken or not left:
        return mask
    return replace(mask, mask=left, shared=left, origin=UNCLAIMED)


def lacks_cpuset(mask: SandboxMask) -> bool:
    """Whether no cpuset is known of a sandbox, so that it depends on what other pods have."""
    return mask.mask is None or mask.origin == UNCLAIMED


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


# Which CPUs of a container are exclusively its own, and how that is known (D9).
#
# A cpuset alone does not say (kata-containers #3726). Five sources are asked in order; the first
# that answers, yes or no, is believed and named:
#
# 1. our own allocator, for the containers it placed;
# 2. the kubelet's checkpoint, where its policy is static and the container can be matched by pod
#    uid and container name;
# 3. DRA claims for CPUs, where the container's cpuset is exactly that of its claims;
# 4. the administrator: `always` takes a cpuset that no other container of the sandbox touches as
#    exclusive, `never` answers no. `never` comes late on purpose: it turns inference off, but does
#    not deny what the kubelet, a claim or the allocator knows. To have no pairs at all, set
#    `vcpus: float`;
# 5. inference from the cgroup path, quota and shares.

MAX_SHARES: Final = 262_144
"""The kernel's and the kubelet's ceiling of CPU shares: that of 256 CPUs."""

_CGROUPFS_POOLED: Final = re.compile(r"(?:^|/)(?:burstable|besteffort)/")
_SYSTEMD_POOLED: Final = re.compile(r"kubepods-(?:burstable|besteffort)(?:-|\.slice|$)")


def exclusive_claims(
    containers: Iterable[Container],
    node: Node,
    handler: str,
    *,
    allocated: Mapping[str, CpuSet] | None = None,
    kept: CpuSet = EMPTY,
) -> tuple[Claim, ...]:
    """Return one claim for each container, in the same order.

    `containers` are those that count (D8); `handler` is the runtime handler of containers
    that name none; `allocated` maps container ids to what our own allocator gave them exclusively
    (empty set: it gave only shared CPUs); `kept` are the CPUs of the last pass's pairs. A claim
    never exceeds the container's recorded cpuset.
    """
    every, settings = tuple(containers), node.settings

    def claim(container: Container) -> Claim:
        if container.kind is ContainerKind.SANDBOX:
            return _no(container, "it is the pod sandbox")
        if not container.cpus:
            return _no(container, "it has no cpuset")
        mode = settings.exclusive_handlers.get(container.handler or handler, settings.exclusive)
        return (
            _from_allocator(container, allocated or {})
            or _from_kubelet(container, every, node.kubelet, kept)
            or _from_claims(container, node.claims)
            or _from_administrator(container, every, mode)
            or _inferred(container)
        )

    return tuple(map(claim, every))


def pooled(cgroups_path: str) -> bool:
    """Return whether a cgroupsPath is under the kubelet's burstable or besteffort group.

    Knows the cgroupfs driver (`/kubepods/burstable/pod<uid>/<id>`) and the systemd driver
    (`kubepods-burstable-pod<uid>.slice:cri-containerd:<id>`), also under another root.
    """
    slice_name, colon, _rest = cgroups_path.partition(":")
    if colon or slice_name.endswith(".slice"):
        return _SYSTEMD_POOLED.search(slice_name) is not None
    return any(one.search(cgroups_path) for one in (_CGROUPFS_POOLED, _SYSTEMD_POOLED))


def looks_exclusive(container: Container) -> bool:
    """Whether cgroup path, quota and shares say that the cpuset is the container's alone."""
    return bool(_inferred(container).exclusive)


def _from_allocator(container: Container, allocated: Mapping[str, CpuSet]) -> Claim | None:
    given = allocated.get(container.id)
    if given is None:
        return None
    if not given:
        return _no(container, "its CPUs are shared", Provenance.ALLOCATOR)
    return _yes(container, given, Provenance.ALLOCATOR, "allocated {cpus}")


def _from_kubelet(
    container: Container,
    every: tuple[Container, ...],
    kubelet: KubeletState | None,
    kept: CpuSet,
) -> Claim | None:
    """Return the checkpoint's answer.

    An in-place resize changes the entry first and the cpuset seconds later. Until then pairs
    outside the new entry keep the old cpuset, unless the CPUs are another pod's by now.

    A pod-level pool is divided among the pod's containers; those without CPUs of their own share
    what is left of it, and each has that as its entry (kubelet 1.37). CPUs of such a pod are
    exclusive only to a container that is alone in using them.
    """
    if kubelet is None or not kubelet.static or not container.pod_uid or not container.name:
        return None
    own = kubelet.entries.get(container.pod_uid, {})
    entry, pool = own.get(container.name), kubelet.pod_entries.get(container.pod_uid)
    if pool:
        rest = pool - union(own.values())
        mine = entry or rest
        users = sum(
            one.kind is ContainerKind.CONTAINER
            and one.pod_uid == container.pod_uid
            and not mine.isdisjoint(own.get(one.name) or rest)
            for one in every
        )
        if users > 1:
            reason = f"the pod's CPUs {mine} are shared by {users} of its containers"
            return _no(container, reason, Provenance.KUBELET)
        if not entry:
            reason = "it alone uses {cpus} of its pod's CPUs"
            return _yes(container, rest, Provenance.KUBELET, reason)
    if not entry:
        return _no(container, "no entry in the kubelet's checkpoint", Provenance.KUBELET)
    left = (container.cpus or EMPTY) - entries_of_others(every, kubelet)
    if kept & (left - entry - _cpus_of_others(container, every)):
        reason = f"its checkpoint entry is {entry}, its cpuset is still {container.cpus}"
        return _yes(container, left, Provenance.KUBELET, reason)
    return _yes(container, entry, Provenance.KUBELET, "its checkpoint entry is {cpus}")


def _from_claims(container: Container, claims: Mapping[str, CpuSet]) -> Claim | None:
    mine = claims_of(container, claims)
    if not mine:
        return None
    reason = f"its cpuset is that of DRA claim {', '.join(sorted(mine))}"
    return _yes(container, container.cpus or EMPTY, Provenance.CLAIM, reason)


def _from_administrator(
    container: Container, every: tuple[Container, ...], mode: ExclusiveMode
) -> Claim | None:
    if mode is ExclusiveMode.AUTO:
        return None
    if mode is ExclusiveMode.NEVER:
        return _no(container, "setting exclusive: never", Provenance.ADMINISTRATOR)
    cpus = container.cpus or EMPTY
    others = _cpus_of_others(container, every)
    if not cpus.isdisjoint(others):
        reason = f"other containers use {cpus & others} too (setting exclusive: always)"
        return _no(container, reason, Provenance.ADMINISTRATOR)
    reason = "no other container uses {cpus} (setting exclusive: always)"
    return _yes(container, cpus, Provenance.ADMINISTRATOR, reason)


def _cpus_of_others(container: Container, every: tuple[Container, ...]) -> CpuSet:
    """Return the CPUs of the sandbox's other containers."""
    return union(
        one.cpus or EMPTY
        for one in every
        if one is not container and one.kind is ContainerKind.CONTAINER
    )


def _inferred(container: Container) -> Claim:
    cpus = container.cpus or EMPTY
    if pooled(container.cgroups_path):
        return _no(container, "pod is not Guaranteed (burstable or besteffort cgroup)")
    size = len(cpus)
    quota = container.quota_us or 0
    period = container.period_us or PERIOD_US
    if quota > 0:
        if quota == size * period:
            reason = f"CPU quota equals {count(size, 'CPU')}"
            return _yes(container, cpus, Provenance.INFERRED, reason)
        return _no(container, f"CPU quota is {quota / period:g} CPUs, its cpuset has {size}")
    expected = min(size * SHARES_PER_CPU, MAX_SHARES)
    if container.shares == expected:
        reason = f"no CPU quota, and CPU shares {expected} equal {count(size, 'CPU')}"
        return _yes(container, cpus, Provenance.INFERRED, reason)
    shares = "none" if container.shares is None else str(container.shares)
    return _no(container, f"no CPU quota, and CPU shares are {shares}, not {expected}")


def _no(container: Container, reason: str, provenance: Provenance = Provenance.NONE) -> Claim:
    return Claim(container.id, EMPTY, provenance, f"not exclusive: {reason}")


def _yes(container: Container, given: CpuSet, provenance: Provenance, reason: str) -> Claim:
    """Claim the part of `given` that is in the container's recorded cpuset."""
    exclusive = given & (container.cpus or EMPTY)
    text = reason.format(cpus=given)
    if exclusive != given:
        text += f", of which its cpuset {container.cpus} has {exclusive or 'none'}"
    return Claim(container.id, exclusive, provenance, text)
