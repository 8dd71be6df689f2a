"""The kubelet's local APIs: the pods with their annotations, and who has which exclusive CPUs.

Sources: k8s.io/kubelet, pkg/apis/pods/v1alpha1 (Kubernetes 1.37: beta, on by default) and
pkg/apis/podresources/v1 (since 1.28). The calls: sources/kubelet_api.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.alloc import PodSpec
from kata_pin.model.cpuset import MAX_CPU, CpuSet
from kata_pin.wire.ids import is_name
from kata_pin.wire.kube.pod_list import MAX_INITS, MAX_POD_BYTES, MAX_PODS, Pods, about_cpus
from kata_pin.wire.proto import kubelet_pb2
from kata_pin.wire.ttrpc import parsed

LIST_PODS: Final = "/v1alpha1.Pods/ListPods"
LIST_RESOURCES: Final = "/v1.PodResourcesLister/List"
ALLOCATABLE: Final = "/v1.PodResourcesLister/GetAllocatableResources"
"""The methods, as gRPC names them. Their requests have no field."""

_PODS: Final = "the kubelet's Pods API"
_RESOURCES: Final = "the kubelet's pod resources"


def parse_listed_pods(data: bytes) -> Pods:
    """Return what is listed of every pod; ParseError if it is not a ListPodsResponse.

    A pod that cannot be read is skipped and never hides the others.
    """
    listed = parsed(kubelet_pb2.ListPodsResponse(), data, _PODS).pods
    if len(listed) > MAX_PODS:
        raise ParseError(f"more than {MAX_PODS} pods", source=_PODS)
    found: dict[str, PodSpec] = {}
    problems: list[ParseError] = []
    for number, pod in enumerate(listed):
        try:
            uid, spec = _pod(pod, f"{_PODS}: pod {number}")
        except ParseError as error:
            problems.append(error)
        else:
            found[uid] = spec
    return Pods(found, tuple(problems))


def _pod(data: bytes, source: str) -> tuple[str, PodSpec]:
    if len(data) > MAX_POD_BYTES:
        raise ParseError(f"longer than {MAX_POD_BYTES} bytes", source=source)
    pod = parsed(kubelet_pb2.Pod(), data, source)
    uid = pod.metadata.uid
    if not is_name(uid):
        raise ParseError("not a uid", source=source, text=uid)
    if len(pod.spec.init_containers) > MAX_INITS:
        raise ParseError(f"more than {MAX_INITS} init containers", source=source)
    inits = {one.name for one in pod.spec.init_containers if one.restart_policy != "Always"}
    pod_level = bool(pod.spec.resources.limits or pod.spec.resources.requests)
    return uid, PodSpec(about_cpus(pod.metadata.annotations), frozenset(inits), pod_level)


@dataclass(frozen=True, slots=True)
class PodResources:
    """What the kubelet lists: exclusive CPUs by container, and those that it may give.

    `containers` has keys `namespace/pod/container`, of those with exclusive CPUs only.
    """

    containers: Mapping[str, CpuSet]
    allocatable: CpuSet


def parse_pod_resources(listed: bytes, allocatable: bytes) -> PodResources:
    """Return both answers in one; raises ParseError."""
    answer = parsed(kubelet_pb2.ListPodResourcesResponse(), listed, _RESOURCES)
    if len(answer.pod_resources) > MAX_PODS:
        raise ParseError(f"more than {MAX_PODS} pods", source=_RESOURCES)
    found = {
        f"{pod.namespace}/{pod.name}/{one.name}": _cpus(one.cpu_ids)
        for pod in answer.pod_resources
        for one in pod.containers
        if one.cpu_ids
    }
    whole = parsed(kubelet_pb2.AllocatableResourcesResponse(), allocatable, _RESOURCES)
    return PodResources(found, _cpus(whole.cpu_ids))


def _cpus(ids: Iterable[int]) -> CpuSet:
    numbers = set(ids)
    if any(not 0 <= one <= MAX_CPU for one in numbers):
        raise ParseError(f"a CPU that is not within 0 to {MAX_CPU}", source=_RESOURCES)
    return CpuSet(numbers)
