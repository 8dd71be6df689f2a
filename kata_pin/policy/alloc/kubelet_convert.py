"""Our state as a kubelet checkpoint, and a kubelet checkpoint as running containers.

For comparison, and for nodes that change from the kubelet's static policy to ours. Pure. Out of
scope: the file format (wire/kube/checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from kata_pin.model.alloc import AllocState, ContainerRequest, Running
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node import KubeletState


def as_kubelet(state: AllocState) -> KubeletState:
    """Return the state as a checkpoint of the static policy: exclusive CPUs by pod and container.

    The default set is all CPUs that are not exclusive, housekeeping CPUs included. A VM's own CPUs
    are entered under the sandbox's id; the format cannot represent CPUs chosen by SHARE containers.
    """
    entries: dict[str, dict[str, CpuSet]] = {}
    for grant in state.grants.values():
        if grant.exclusive:
            of_pod = entries.setdefault(grant.pod_uid, {})
            of_pod[grant.request.name or grant.container_id] = grant.exclusive
    return KubeletState("static", state.shared | state.housekeeping, entries)


def from_kubelet(
    kubelet: KubeletState, requests: Iterable[ContainerRequest]
) -> tuple[Running, ...]:
    """Return what runs, with its CPUs in the checkpoint: for Policy.reconcile.

    Containers without an entry have the default set. Entries of others are left out.
    """
    return tuple(
        Running(one, kubelet.entries.get(one.pod.pod_uid, {}).get(one.name, kubelet.default))
        for one in requests
    )
