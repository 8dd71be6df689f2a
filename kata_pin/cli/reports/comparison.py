"""The `alloc-compare` document: what the kubelet gave, beside what kata-pin gives or would. Pure.

Where our allocator decides, its grants are compared. Elsewhere a policy is supposed to take over
from the kubelet: then a container whose CPUs are the same would not be moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kata_pin.model.alloc import ContainerRequest, PodRequest, Qos
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.node import KubeletState
from kata_pin.model.reports.compare import ComparedContainer, Comparison
from kata_pin.model.settings import CpuClass
from kata_pin.policy.alloc.kubelet_convert import as_kubelet, from_kubelet
from kata_pin.policy.alloc.policy import Policy

SAME: Final = "same"
MOVED: Final = "other pCPUs"
KUBELET_ONLY: Final = "kubelet only"
OURS_ONLY: Final = "kata-pin only"


def taken_over(kubelet: KubeletState, policy: Policy) -> KubeletState:
    """Return what a policy would make of a node that the kubelet decided until now.

    Each entry stands for a container of a Guaranteed pod that requests as many CPUs as it has, and
    has asked for exclusive ones where the policy wants to be asked. No VM is supposed behind it.
    """
    requests = [
        ContainerRequest(
            f"{uid}/{name}",
            PodRequest(uid, qos=Qos.GUARANTEED, ordered=CpuClass.EXCLUSIVE),
            name,
            cpu_millis=len(cpus) * 1000,
            quota_us=len(cpus) * 100_000,
        )
        for uid, name, cpus in _entries(kubelet)
    ]
    running = from_kubelet(kubelet, requests)
    return as_kubelet(policy.reconcile(policy.start(), running).state)


def comparison(
    kubelet: KubeletState, ours: KubeletState, *, source: str, policy: str, hypothetical: bool
) -> Comparison:
    """Return the document. `hypothetical`: ours is what `policy` would give, not what it gave."""
    theirs = {(uid, name): cpus for uid, name, cpus in _entries(kubelet)}
    own = {(uid, name): cpus for uid, name, cpus in _entries(ours)}
    rows = [_row(key, theirs.get(key, EMPTY), own.get(key, EMPTY)) for key in {**theirs, **own}]
    return Comparison(
        checkpoint=source,
        kubelet_policy=kubelet.policy,
        policy=policy,
        hypothetical=hypothetical,
        same=all(row.verdict == SAME for row in rows) and kubelet.default == ours.default,
        kubelet_shared=str(kubelet.default),
        kata_pin_shared=str(ours.default),
        containers=tuple(rows),
    )


def _entries(state: KubeletState) -> Iterator[tuple[str, str, CpuSet]]:
    for uid, containers in state.entries.items():
        for name, cpus in containers.items():
            if cpus:
                yield uid, name, cpus


def _row(key: tuple[str, str], kubelet: CpuSet, ours: CpuSet) -> ComparedContainer:
    verdict = SAME if kubelet == ours else MOVED
    if not ours:
        verdict = KUBELET_ONLY
    elif not kubelet:
        verdict = OURS_ONLY
    uid, name = key
    return ComparedContainer(uid, name, str(kubelet), str(ours), verdict)
