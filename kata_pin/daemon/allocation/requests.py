"""What a container requests from the allocator, derived from NRI's report or from its record.

A runtime does not know the pod's spec: the CPU request is derived from CFS shares, the pod's QoS
class from the parent cgroup. Where that is not the kubelet's, the container's own limit and request
stand for the pod's. Pure. Out of scope: what it gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.adjustment import Limits
from kata_pin.model.alloc import (
    PERIOD_US,
    ContainerRequest,
    Grant,
    PodRequest,
    PodSpec,
    Qos,
    millis_of_shares,
)
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.sandbox import Container
from kata_pin.model.settings import CpuClass
from kata_pin.policy.alloc.allotment import vm_of
from kata_pin.policy.placement.exclusive import pooled
from kata_pin.wire.allocator_state import MAX_MILLIS
from kata_pin.wire.kube.pod_list import about_cpus
from kata_pin.wire.nri.messages import Pod, PodContainer
from kata_pin.wire.nri.replies import Cpuset
from kata_pin.wire.oci import CpuResources

_KUBELETS: Final = "kubepods"
_LEAST_SHARES: Final = 2
"""What the kernel takes as none, and the kubelet writes for a request of nothing."""


def pod_uid(pod: Pod) -> str:
    """Return what a pod is known by: its uid, its sandbox's id where it has none."""
    return pod.uid or pod.id


def request_of(pod: Pod, container: PodContainer, *, kata: bool) -> ContainerRequest:
    """Return the request of a container that NRI reports."""
    of = PodRequest(
        pod_uid(pod),
        pod.namespace,
        pod.name,
        pod.handler,
        about_cpus(pod.annotations),
        _qos(container.cgroups_path, container.cpu),
        kata=kata,
        sandbox_id=vm_of(pod.id) if kata else "",
    )
    limits = cpuset_of(container.cpu, container.memory).limits
    return replace(_request(container.id, container.name, container.cpu, of), limits=limits)


def request_of_record(record: Container) -> ContainerRequest:
    """Return the request of a Kata container that hooks reported; annotations are not known."""
    cpu = CpuResources(quota_us=record.quota_us, period_us=record.period_us, shares=record.shares)
    of = PodRequest(
        record.pod_uid or record.sandbox_id,
        record.pod_namespace,
        record.pod_name,
        record.handler,
        qos=_qos(record.cgroups_path, cpu),
        kata=True,
        sandbox_id=vm_of(record.sandbox_id),
    )
    return _request(record.id, record.name, cpu, of)


def with_asked(cpu: CpuResources, asked: CpuResources) -> CpuResources:
    """Return a container's resources as UpdateContainer would leave them: 0 and "" change nothing.

    containerd fills missing numbers with 0 (internal/cri/nri, fromCRILinuxResources).
    """
    return CpuResources(
        cpus=asked.cpus or cpu.cpus,
        mems=asked.mems or cpu.mems,
        quota_us=asked.quota_us or cpu.quota_us,
        period_us=asked.period_us or cpu.period_us,
        shares=asked.shares or cpu.shares,
    )


def cpuset_of(cpu: CpuResources, memory: int | None = None) -> Cpuset:
    """Return the cpuset and limits of a container's resources, `memory` in bytes.

    A text that is no list, and 0, count as none.
    """
    limits = Limits(cpu.shares or None, cpu.quota_us or None, cpu.period_us or None, memory)
    return Cpuset(_cpus(cpu.cpus), _cpus(cpu.mems), limits)


def as_requested(request: ContainerRequest, grant: Grant | None) -> ContainerRequest:
    """Return a request in which limits that its grant's policy set are not taken for the pod's.

    A runtime reports them as the container's own once they are applied.
    """
    if grant is None or not grant.limits:
        return request
    ours, before = grant.limits, grant.request
    request = replace(request, limits=request.limits.but(ours, before.limits))
    if ours.shares is not None and millis_of_shares(ours.shares) == request.cpu_millis:
        request = replace(request, cpu_millis=before.cpu_millis)
    if ours.quota_us is not None and ours.quota_us == request.quota_us:
        request = replace(request, quota_us=before.quota_us)
    if ours.period_us is not None and ours.period_us == request.period_us:
        request = replace(request, period_us=before.period_us)
    return replace(request, pod=replace(request.pod, qos=before.pod.qos))


def _cpus(text: str) -> CpuSet:
    try:
        return CpuSet.parse(text)
    except ParseError:
        return EMPTY


def _request(container_id: str, name: str, cpu: CpuResources, pod: PodRequest) -> ContainerRequest:
    shares = cpu.shares or 0
    return ContainerRequest(
        container_id,
        pod,
        name,
        cpu_millis=0 if shares <= _LEAST_SHARES else min(millis_of_shares(shares), MAX_MILLIS),
        quota_us=cpu.quota_us,
        period_us=cpu.period_us or PERIOD_US,
    )


def _qos(cgroups_path: str, cpu: CpuResources) -> Qos:
    if pooled(cgroups_path):
        return Qos.BEST_EFFORT if "besteffort" in cgroups_path else Qos.BURSTABLE
    if _KUBELETS in cgroups_path:
        return Qos.GUARANTEED
    alone = _request("", "", cpu, PodRequest(""))
    equal = 0 < alone.limit_millis == alone.cpu_millis
    return Qos.GUARANTEED if equal else Qos.BURSTABLE


Specs = Mapping[str, PodSpec]
"""What the kubelet lists of pods, by uid."""


@dataclass(slots=True)
class PodChoices:
    """The newest choices; `orders` are by `namespace/name` or sandbox id."""

    orders: Mapping[str, CpuClass] = field(default_factory=dict)
    specs: Specs = field(default_factory=dict)

    def ordered(self, namespace: str, name: str, sandbox_id: str) -> CpuClass | None:
        """Return the administrator's override for a pod."""
        by_name = self.orders.get(f"{namespace}/{name}") if name else None
        return by_name or self.orders.get(sandbox_id)

    def is_init(self, request: ContainerRequest) -> bool | None:
        """Whether it is an init container and no sidecar; None if its pod is not listed."""
        spec = self.specs.get(request.pod.pod_uid)
        return None if spec is None else request.name in spec.inits

    def newest(
        self, request: ContainerRequest, sandbox_id: str, known: PodRequest | None
    ) -> ContainerRequest:
        """Return a request with its pod's override, annotations and resources of now.

        A runtime always reports the annotations of the pod's creation, and records have none: those
        of `known`, the pod in the container's grant, are newer.
        """
        pod = request.pod
        last = known.annotations if known is not None and known.annotations else pod.annotations
        level = pod.pod_level if known is None else known.pod_level
        spec = self.specs.get(pod.pod_uid, PodSpec(last, pod_level=level))
        ordered = self.ordered(pod.namespace, pod.name, sandbox_id)
        newest = replace(
            pod, annotations=spec.annotations, ordered=ordered, pod_level=spec.pod_level
        )
        return replace(request, pod=newest)
