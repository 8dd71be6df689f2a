"""What a container requests from the allocator, and the allocator's state as JSON (D15)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import msgspec
from msgspec.structs import replace

from kata_pin.base.allocation import (
    PERIOD_US,
    AllocState,
    ContainerRequest,
    Grant,
    Limits,
    PodRequest,
    PodSpec,
    Qos,
    millis_of_shares,
)
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.base.json_text import load_fields
from kata_pin.base.sandbox import Container
from kata_pin.base.values import CpuClass
from kata_pin.peers.kubelet.pods import about_cpus
from kata_pin.peers.nri.messages import Pod, PodContainer
from kata_pin.peers.nri.replies import Cpuset
from kata_pin.peers.oci import CpuResources
from kata_pin.placement.exclusive import pooled
from kata_pin.placement.masks import vm_of

# The allocator's state as a JSON document, for the registry (D15).
#
# The members are the fields of the values in base/allocation.py, pods inside their grants, CPU sets
# in Linux's list format. Renaming a field there changes the document: raise VERSION then. A
# document of another version, a damaged one or one that contradicts itself is a ParseError, and the
# daemon rebuilds the state from what runs. Codec only: no files, no clocks.

VERSION: Final = 2
MAX_BYTES: Final = 64 * 1024 * 1024
MAX_VALUES: Final = 4_000_000
MAX_GRANTS: Final = 65_536
"""Twice the containers that a node is believed to have: each pod can have a VM too."""

MAX_MILLIS: Final = 8192 * 1000

_SOURCE: Final = "allocator state"
_MAX_US: Final = (1 << 63) - 1


class _Document(msgspec.Struct, frozen=True):
    """The document's members, in their order."""

    version: int
    cpus: CpuSet
    reserved: CpuSet
    housekeeping: CpuSet
    grants: tuple[Grant, ...]


def dump_state(state: AllocState) -> bytes:
    """Return the document of a state; equal states give equal bytes."""
    grants = tuple(state.grants.values())
    document = _Document(VERSION, state.cpus, state.reserved, state.housekeeping, grants)
    listed = cache(str)  # most grants have the same few sets, those of the pools
    return msgspec.json.encode(document, enc_hook=listed, order="deterministic")


def parse_state(data: bytes) -> AllocState:
    """Return the state of a document; ParseError names the member that cannot be ours.

    No CPU may be exclusive twice, exclusive CPUs must be among `cpus`, and a container has one
    grant.
    """
    fields = load_fields(data, source=_SOURCE, limit=MAX_BYTES, values=MAX_VALUES)
    if fields.need("version").number("version", 0, 1 << 31) != VERSION:
        raise fields.fail("version", f"not {VERSION}")
    try:
        document = msgspec.json.decode(data, type=_Document, dec_hook=_cpus)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise fields.fail(path.rstrip("`"), message) from error
    except ValueError as error:  # half of a surrogate pair
        raise ParseError(str(error), source=_SOURCE) from error
    if len(document.grants) > MAX_GRANTS:
        raise fields.fail("grants", f"more than {MAX_GRANTS} entries")
    grants: dict[str, Grant] = {}
    taken = EMPTY
    for number, grant in enumerate(document.grants):
        if grant.container_id in grants:
            raise fields.fail(f"grants[{number}]", "container_id has a grant already")
        for wrong in _contradictions(grant, document.cpus - taken):
            raise fields.fail(f"grants[{number}]", wrong)
        taken |= grant.exclusive
        grants[grant.container_id] = grant
    return AllocState(document.cpus, document.reserved, document.housekeeping, grants)


def _contradictions(grant: Grant, free: CpuSet) -> Iterator[str]:
    """Yield what is wrong with a grant; `free` are the CPUs that it may have exclusively."""
    request = grant.request
    if not request.container_id:
        yield "container_id is empty"
    if not grant.exclusive <= free:
        yield f"exclusive CPUs {grant.exclusive} are not free"
    for name, number, low, high in (
        ("cpu_millis", request.cpu_millis, 0, MAX_MILLIS),
        ("overhead_millis", request.pod.overhead_millis, 0, MAX_MILLIS),
        ("quota_us", request.quota_us or 0, -_MAX_US, _MAX_US),
        ("period_us", request.period_us, 0, _MAX_US),
    ):
        if not low <= number <= high:
            yield f"{name} is not within {low} to {high}"


def _cpus(_: type, text: object) -> CpuSet:
    """Read a CPU set for msgspec, which adds the path to the error."""
    if not isinstance(text, str):
        raise TypeError("not a CPU list")
    try:
        return CpuSet.parse(text)
    except ParseError as error:
        raise ValueError(error.message) from error


# What a container requests from the allocator, derived from NRI's report or from its record.
#
# A runtime does not know the pod's spec: the CPU request is derived from CFS shares, the pod's QoS
# class from the parent cgroup. Where that is not the kubelet's, the container's own limit and
# request stand for the pod's.

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
    return Cpuset(_requested_cpus(cpu.cpus), _requested_cpus(cpu.mems), limits)


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


def _requested_cpus(text: str) -> CpuSet:
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
        by_name = self.orders.get(f"{pod.namespace}/{pod.name}") if pod.name else None
        ordered = by_name or self.orders.get(sandbox_id)
        newest = replace(
            pod, annotations=spec.annotations, ordered=ordered, pod_level=spec.pod_level
        )
        return replace(request, pod=newest)
