"""What policy needs to know about the node beside the sandbox itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.settings import PlacementSettings
from kata_pin.model.topology import HostTopology


@dataclass(frozen=True, slots=True)
class KubeletState:
    """The kubelet's CPU manager checkpoint, verified.

    `entries` maps pod uid to container name to its exclusive CPUs; `pod_entries` maps pod uid to
    the CPUs of a pod-level assignment (versions 3 and 4). `default` is the shared pool.
    """

    policy: str
    default: CpuSet
    entries: Mapping[str, Mapping[str, CpuSet]] = field(default_factory=dict, hash=False)
    pod_entries: Mapping[str, CpuSet] = field(default_factory=dict, hash=False)
    version: int = 2

    @property
    def static(self) -> bool:
        """Whether the kubelet allocates exclusive CPUs on this node."""
        return self.policy == "static"


@dataclass(frozen=True)
class Node:
    """Facts of the node that placement depends on.

    `release_mask` is what a thread gets when it is released and nothing else is known: the
    affinity of pid 1 with offline CPUs taken out (D18). `live_threads` says whether new
    threads are reported as they are born: without that the VMM's main thread keeps the whole
    sandbox mask, because new threads inherit its affinity (D11).
    """

    topology: HostTopology
    settings: PlacementSettings = field(default_factory=PlacementSettings)
    kubelet: KubeletState | None = None
    release_mask: CpuSet = EMPTY
    live_threads: bool = True
