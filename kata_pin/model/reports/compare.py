"""The alloc-compare document: a kubelet checkpoint beside kata-pin's grants."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION, Cpus


@dataclass(frozen=True, slots=True)
class ComparedContainer:
    """One container with exclusive pCPUs from the kubelet or from kata-pin."""

    pod_uid: str  #: the pod's uid
    name: str  #: container name; its id if it has none
    kubelet: Cpus  #: exclusive pCPUs given by the kubelet
    kata_pin: Cpus  #: exclusive pCPUs given by kata-pin
    verdict: str  #: One of `same`, `other pCPUs`, `kubelet only`, `kata-pin only`


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Printed by `alloc compare`."""

    version: int = VERSION  #: version of the document
    kind: str = "alloc-compare"  #: kind of the document
    checkpoint: str  #: the checkpoint file
    kubelet_policy: str  #: the policy that it names
    policy: str  #: kata-pin's policy
    hypothetical: bool  #: whether kata-pin would take over; false: it has decided already
    same: bool  #: whether no container would get other pCPUs
    kubelet_shared: Cpus  #: the kubelet's default set
    kata_pin_shared: Cpus  #: pCPUs that no container owns, housekeeping included
    containers: tuple[ComparedContainer, ...]  #: containers with exclusive pCPUs
