"""Which CPUs of a container are exclusively its own, and how that is known (D9).

A cpuset alone does not say (kata-containers #3726). Five sources are asked in order; the first that
answers, yes or no, is believed and named:

1. our own allocator, for the containers it placed;
2. the kubelet's checkpoint, where its policy is static and the container can be matched by pod uid
   and container name;
3. DRA claims for CPUs, where the container's cpuset is exactly that of its claims;
4. the administrator: `always` takes a cpuset that no other container of the sandbox touches as
   exclusive, `never` answers no. `never` comes late on purpose: it turns inference off, but does
   not deny what the kubelet, a claim or the allocator knows. To have no pairs at all, set
   `vcpus: float`;
5. inference from the cgroup path, quota and shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kata_pin.model.alloc import PERIOD_US, SHARES_PER_CPU
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.node import KubeletState, Node
from kata_pin.model.placement import Claim, Provenance
from kata_pin.model.sandbox import Container, ContainerKind
from kata_pin.model.settings import ExclusiveMode
from kata_pin.policy.placement.others import claims_of, entries_of_others

MAX_SHARES: Final = 262_144
"""The kernel's and the kubelet's ceiling of CPU shares: that of 256 CPUs."""

_CGROUPFS_POOLED: Final = re.compile(r"(?:^|/)(?:burstable|besteffort)/")
_SYSTEMD_POOLED: Final = re.compile(r"kubepods-(?:burstable|besteffort)(?:-|\.slice|$)")


def claims(
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
    every = tuple(containers)
    known = _Known(node, handler, allocated or {}, kept)
    return tuple(_claim(one, every, known) for one in every)


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


class _Known(NamedTuple):
    """What is known beside the containers: see `claims`."""

    node: Node
    handler: str
    allocated: Mapping[str, CpuSet]
    kept: CpuSet


def _claim(container: Container, every: tuple[Container, ...], known: _Known) -> Claim:
    if container.kind is ContainerKind.SANDBOX:
        return _no(container, "it is the pod sandbox")
    if not container.cpus:
        return _no(container, "it has no cpuset")
    settings = known.node.settings
    mode = settings.exclusive_handlers.get(container.handler or known.handler, settings.exclusive)
    return (
        _from_allocator(container, known.allocated)
        or _from_kubelet(container, every, known.node.kubelet, known.kept)
        or _from_claims(container, known.node.claims)
        or _from_administrator(container, every, mode)
        or _inferred(container)
    )


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

    A pod-level pool belongs to all containers of the pod that have no CPUs of their own, so it is
    exclusive only to a container that is alone in using it.
    """
    if kubelet is None or not kubelet.static or not container.pod_uid or not container.name:
        return None
    own = kubelet.entries.get(container.pod_uid, {})
    entry, pool = own.get(container.name), kubelet.pod_entries.get(container.pod_uid)
    if entry:
        left = (container.cpus or EMPTY) - entries_of_others(every, kubelet)
        if kept & (left - entry - _cpus_of_others(container, every)):
            reason = f"its checkpoint entry is {entry}, its cpuset is still {container.cpus}"
            return _yes(container, left, Provenance.KUBELET, reason)
        return _yes(container, entry, Provenance.KUBELET, "its checkpoint entry is {cpus}")
    if not pool:
        return _no(container, "no entry in the kubelet's checkpoint", Provenance.KUBELET)
    users = sum(
        one.kind is ContainerKind.CONTAINER
        and one.pod_uid == container.pod_uid
        and not own.get(one.name)
        for one in every
    )
    if users > 1:
        reason = f"the pod's CPUs {pool} are shared by {users} of its containers"
        return _no(container, reason, Provenance.KUBELET)
    reason = "it alone uses {cpus} of its pod's CPUs"
    return _yes(container, pool - union(own.values()), Provenance.KUBELET, reason)


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
