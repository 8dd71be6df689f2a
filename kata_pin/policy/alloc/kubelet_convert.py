"""Our state as the kubelet would write it, and the kubelet's as something to take over.

For comparison, and for nodes that change from the kubelet's static policy to ours. The files are
wire/kubelet's business. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from kata_pin.model.alloc import AllocState, ContainerRequest, Running
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node import KubeletState


def as_kubelet(state: AllocState) -> KubeletState:
    """Return the state as a checkpoint of the static policy: exclusive CPUs by pod and container.

    The default set is what no container has for itself, housekeeping CPUs included. A VM's own CPUs
    stand under the sandbox's id; what SHARE containers chose the kubelet has no word for.
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
    """Return what runs, with the CPUs that the checkpoint gives it: for Policy.reconcile.

    Those without an entry have the default set. Entries of containers that do not run are left out.
    """
    return tuple(
        Running(one, kubelet.entries.get(one.pod.pod_uid, {}).get(one.name, kubelet.default))
        for one in requests
    )
