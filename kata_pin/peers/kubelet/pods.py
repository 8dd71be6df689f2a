"""The pods of the kubelet with their annotations, and the exclusive CPUs that it granted."""

from __future__ import annotations

import asyncio
import http.client
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from kata_pin.base.allocation import ANNOTATIONS, PodSpec
from kata_pin.base.cpuset import MAX_CPU, CpuSet
from kata_pin.base.errors import ParseError, StateError
from kata_pin.base.json_text import check_bounds, is_name, load_fields
from kata_pin.peers.cri import DEADLINE_S, CallRefused, GrpcSocket, SocketUnusable
from kata_pin.peers.http import Hints, HttpAnswer, HttpClient
from kata_pin.peers.proto import kubelet_pb2
from kata_pin.peers.ttrpc import parsed

log = logging.getLogger(__name__)

T = TypeVar("T")


# What the kubelet's list of pods says about CPUs (`/pods`, a v1.PodList).
#
# Annotations, which containers are init containers, and whether the pod itself has requests or
# limits. Source: Kubernetes API reference, core/v1 PodList, ObjectMeta and PodSpec.

MAX_BYTES: Final = 16 * 1024 * 1024
"""Longest list accepted: 500 pods of 32 KiB."""

MAX_VALUES: Final = 500_000
"""Most brackets and commas of a list outside texts."""

MAX_POD_BYTES: Final = 2 * 1024 * 1024
"""Longest pod; etcd takes no object above 1.5 MiB."""

MAX_PODS: Final = 4096
MAX_VALUE: Final = 253  # longest value that is kept; the meaningful ones are single words

_SOURCE: Final = "pod list"

MAX_INITS: Final = 256
"""Most init containers of a pod that is believed."""


def about_cpus(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return those of a pod's annotations that are about CPUs."""
    return {key: annotations[key][:MAX_VALUE] for key in ANNOTATIONS if key in annotations}


class Pods(NamedTuple):
    """The pods of a list by uid; `problems` are the errors of pods that were skipped."""

    specs: Mapping[str, PodSpec]
    problems: tuple[ParseError, ...] = ()


class _List(msgspec.Struct):
    """The members of a list that are used; a pod is parsed when its turn comes."""

    kind: str = ""
    items: list[msgspec.Raw] | None = None


def parse_pods(data: bytes | bytearray) -> Pods:
    """Return what is listed of every pod; ParseError if it is not a PodList.

    A pod that cannot be read is skipped and never hides the others. One pod is parsed at a time,
    because a parsed list would take ten times its bytes.
    """
    check_bounds(data, source=_SOURCE, limit=MAX_BYTES, values=MAX_VALUES)
    try:
        whole = msgspec.json.decode(data, type=_List)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ParseError(f"not a list of pods: {error}", source=_SOURCE) from error
    except RecursionError:
        raise ParseError("nested too deeply", source=_SOURCE) from None
    if whole.kind != "PodList":
        raise ParseError("not a PodList", source=f"{_SOURCE}: kind", text=whole.kind)
    items = whole.items or []
    if len(items) > MAX_PODS:
        raise ParseError(f"more than {MAX_PODS} entries", source=f"{_SOURCE}: items")
    return _read_each(items, _pod, f"{_SOURCE}: items[{{}}]")


def _read_each(
    pods: Iterable[T], read: Callable[[T, str], tuple[str, PodSpec]], source: str
) -> Pods:
    """Return the pods that can be read; `source` names one by its number."""
    found: dict[str, PodSpec] = {}
    problems: list[ParseError] = []
    for number, pod in enumerate(pods):
        try:
            uid, spec = read(pod, source.format(number))
        except ParseError as error:
            problems.append(error)
        else:
            found[uid] = spec
    return Pods(found, tuple(problems))


def _pod(data: msgspec.Raw, source: str) -> tuple[str, PodSpec]:
    item = load_fields(bytes(data), source=source, limit=MAX_POD_BYTES)
    metadata, spec = item.fields("metadata").need("uid"), item.fields("spec")
    uid = metadata.text("uid")
    if not is_name(uid):
        raise metadata.fail("uid", "not a uid", uid)
    listed = spec.objects("initContainers", limit=MAX_INITS)
    inits = (one.text("name") for one in listed if one.text("restartPolicy") != "Always")
    resources = spec.fields("resources")
    pod_level = any(resources.fields(kind).names for kind in ("requests", "limits"))
    annotations = about_cpus(metadata.fields("annotations").chosen(ANNOTATIONS))
    return uid, PodSpec(annotations, frozenset(inits), pod_level)


# The kubelet's local APIs: the pods with their annotations, and who has which exclusive CPUs.
#
# Sources: k8s.io/kubelet, pkg/apis/pods/v1alpha1 (Kubernetes 1.37: beta, on by default) and
# pkg/apis/podresources/v1 (since 1.28).

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
    return _read_each(listed, _api_pod, f"{_PODS}: pod {{}}")


def _api_pod(data: bytes, source: str) -> tuple[str, PodSpec]:
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


class PodResources(Struct, frozen=True):
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


# Asking the kubelet for its pods, to see which annotations running pods have now.
#
# NRI reports a pod's annotations when a container is created and never again, and never which
# containers are init containers. The kubelet has both from the API server and answers `GET /pods`
# on port 10250 (https, with a credential that may `get` `nodes/pods`, before Kubernetes 1.33
# `nodes/proxy`) or, where it is still open, on 10255 (http, no credential). Source: Kubernetes'
# documentation, Kubelet authentication and authorization.
#
# A kubelet's own certificate, unless the administrator gave it one, is signed by itself and names
# the node alone, not its addresses. How a request is bounded: peers/http.py.
#
# A long list hardly delays the event loop: 600 pods of 50 KiB by 23 ms at most, in 0.4 s.

_HINTS: Final = {
    http.client.UNAUTHORIZED: "its token or client certificate is not accepted, or has expired",
    http.client.FORBIDDEN: "it needs `get` on nodes/pods, before Kubernetes 1.33 on nodes/proxy",
}
"""What to do about an answer's status."""

_TLS: Final = Hints(
    authority="name its authority in alloc.pods_ca, /var/lib/kubelet/pki/kubelet.crt by default",
    name="set alloc.pods_name to the node's name",
)

Specs = Mapping[str, PodSpec]
"""Pods by uid."""


@dataclass
class PodList(HttpClient):
    """Where to ask: `url` with its path."""

    most: int = MAX_BYTES
    hints: Hints = _TLS
    thread: str = "pod list"
    name_setting: str = "alloc.pods_name"

    async def read(self) -> Specs:
        """Return what is listed of each pod; raises StateError with the reason."""
        return await self.ask("GET", self._path(), self._specs)

    def _path(self) -> str:
        try:
            return "" if urlsplit(self.url).path else "/pods"
        except ValueError:  # reported by the request
            return ""

    def _specs(self, answer: HttpAnswer) -> Specs:
        if answer.status != http.client.OK:
            hint = _HINTS.get(answer.status, "")
            raise StateError(f"{self.url}: the kubelet answered HTTP {answer.status}", hint=hint)
        pods = parse_pods(answer.body)
        for problem in pods.problems:
            log.debug("%s: pod skipped: %s", self.url, problem)
        return pods.specs


# Asking the kubelet over its root-owned sockets: its pods, and the exclusive CPUs that it granted.
#
# The Pods API has running pods with their present annotations, without a token and without TLS; the
# pod-resources API says which CPUs the CPU manager granted, and which it may grant.

_API_HINTS: Final = {
    "UNIMPLEMENTED": "the Pods API is there from Kubernetes 1.37 on",
    "FAILED_PRECONDITION": "the kubelet is starting",
    "DEADLINE_EXCEEDED": f"no answer within {DEADLINE_S:g} s",
}


class PodsApi(GrpcSocket, frozen=True):
    """The kubelet's Pods API at a socket."""

    async def read(self) -> Specs:
        """Return what is listed of each pod by uid; raises StateError with the reason."""
        data = await _asked(self, LIST_PODS)
        pods = await asyncio.to_thread(parse_listed_pods, data)
        for problem in pods.problems:
            log.debug("%s: pod skipped: %s", self.path, problem)
        return pods.specs


async def read_pod_resources(path: str) -> PodResources:
    """Return the exclusive CPUs that a kubelet lists; raises StateError, ParseError."""
    server = GrpcSocket(path)
    listed = await _asked(server, LIST_RESOURCES)
    return parse_pod_resources(listed, await _asked(server, ALLOCATABLE))


async def _asked(server: GrpcSocket, name: str) -> bytes:
    try:
        return await server.call(name, b"")
    except SocketUnusable as error:
        raise StateError(error.message) from error
    except CallRefused as error:
        hint = _API_HINTS.get(error.code, "")
        raise StateError(
            f"{server.path}: the kubelet refused {name}: {error.message}", hint=hint
        ) from error
