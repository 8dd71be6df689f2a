"""What policy needs to know about the node beside the sandbox itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.settings import PlacementSettings
from kata_pin.model.topology import HostTopology


@dataclass(frozen=True, slots=True)
class DoubleAssignment:
    """Exclusive CPUs that the kubelet gave to several pods, or to one and the shared pool.

    `pods` are uids; `in_default` says whether the CPUs, or some of them, are in the shared pool.
    """

    cpus: CpuSet
    pods: tuple[str, ...]
    in_default: bool = False


@dataclass(frozen=True, slots=True)
class KubeletState:
    """The kubelet's CPU manager checkpoint, verified.

    `entries` maps pod uid to container name to its exclusive CPUs; `pod_entries` maps pod uid to
    the CPUs of a pod-level assignment (versions 3 and 4). `default` is the shared pool. `doubles`
    are the first CPUs that are assigned twice, as the kubelet does on hosts with cores of different
    sizes. A pod's own containers may overlap (with an init container that has ended): that is none.
    """

    policy: str
    default: CpuSet
    entries: Mapping[str, Mapping[str, CpuSet]] = field(default_factory=dict, hash=False)
    pod_entries: Mapping[str, CpuSet] = field(default_factory=dict, hash=False)
    version: int = 2
    doubles: tuple[DoubleAssignment, ...] = field(default=(), compare=False)

    @property
    def static(self) -> bool:
        """Whether the kubelet allocates exclusive CPUs on this node."""
        return self.policy == "static"


@dataclass(frozen=True)
class Node:
    """Facts of the node that placement depends on.

    `claims` are the CPUs of DRA claims, by the claim's uid: each claim is one container's.

    `release_mask` is what a thread gets when it is released and nothing else is known: the
    affinity of pid 1 with offline CPUs taken out (D18). `live_threads` says whether new
    threads are reported as they are born: without that the VMM's main thread keeps the whole
    sandbox mask, because new threads inherit its affinity (D11).
    """

    topology: HostTopology
    settings: PlacementSettings = field(default_factory=PlacementSettings)
    kubelet: KubeletState | None = None
    claims: Mapping[str, CpuSet] = field(default_factory=dict, hash=False)
    release_mask: CpuSet = EMPTY
    live_threads: bool = True

    @property
    def assigned(self) -> CpuSet:
        """What DRA claims and the kubelet's checkpoint give, also to pods without a VM."""
        claimed, kubelet = union(self.claims.values()), self.kubelet
        if kubelet is None or not kubelet.static:
            return claimed
        entries = (cpus for of in kubelet.entries.values() for cpus in of.values())
        return union((claimed, *entries, *kubelet.pod_entries.values()))
