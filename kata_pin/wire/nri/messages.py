"""NRI's messages, version v1alpha1: what the runtime reports.

The runtime (containerd, CRI-O) calls the service Plugin; the plugin calls the service Runtime to
register. Source: github.com/containerd/nri, pkg/api/api.proto and pkg/adaptation. From NRI 0.12 on
each event has its own method; before that, events that a plugin cannot influence come as
StateChange with a number. Both become an Event here. What the plugin sends: replies.py. Out of
scope: the connection (sources), and whether a pod is Kata's (daemon).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final, TypeVar

from kata_pin.errors import ParseError
from kata_pin.model.alloc import ANNOTATIONS
from kata_pin.model.cpuset import MAX_TEXT
from kata_pin.model.sandbox import Container, ContainerKind, ContainerState
from kata_pin.wire import proto
from kata_pin.wire.annotations import KATA_CONFIG, KATA_PINNING, quiet_keys
from kata_pin.wire.container_id import ContainerIds, build
from kata_pin.wire.ids import check_id
from kata_pin.wire.oci import MAX_PID, CpuResources, kept
from kata_pin.wire.ttrpc import parsed

if TYPE_CHECKING:
    from google.protobuf.message import Message

PLUGIN_SERVICE: Final = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE: Final = "nri.pkg.api.v1alpha1.Runtime"
MAX_PODS: Final = 4096
MAX_CONTAINERS: Final = 16384
"""Most that a node is believed to have; the kubelet's limit is 110 pods unless raised."""

REQUEST_MS: Final = 2000  # the runtime's timeout where Configure does not have it (NRI before 0.8)
MAX_TIMEOUT_MS: Final = 3_600_000

_MAX_NAME: Final = 253  # longest name of Kubernetes: a DNS subdomain
_MAX_PATH: Final = 4096
_ANNOTATIONS: Final = (*ANNOTATIONS, KATA_CONFIG, *KATA_PINNING)
_NO_CPU: Final = CpuResources()
M = TypeVar("M", bound="Message")


class EventKind(IntEnum):
    """The events that are used, by their number in NRI's enum `Event`."""

    RUN_POD_SANDBOX = 1
    STOP_POD_SANDBOX = 2
    REMOVE_POD_SANDBOX = 3
    CREATE_CONTAINER = 4
    POST_CREATE_CONTAINER = 5
    START_CONTAINER = 6
    POST_START_CONTAINER = 7
    UPDATE_CONTAINER = 8
    POST_UPDATE_CONTAINER = 9
    STOP_CONTAINER = 10
    REMOVE_CONTAINER = 11

    @property
    def method(self) -> str:
        """The name of the event's method in the service Plugin."""
        return self.name.title().replace("_", "")

    @property
    def of_pod(self) -> bool:
        """Whether the event is about a pod and has no container."""
        return self <= EventKind.REMOVE_POD_SANDBOX

    @property
    def ends(self) -> bool:
        """Whether the pod or container has stopped by then."""
        return self.name.startswith(("STOP", "REMOVE"))


_BY_METHOD: Final = {kind.method: kind for kind in EventKind}

ASKED: Final = frozenset({EventKind.CREATE_CONTAINER, EventKind.UPDATE_CONTAINER})
"""The events whose answer decides something; an observer does not subscribe to them."""

OBSERVED: Final = tuple(
    kind for kind in EventKind if kind not in {*ASKED, EventKind.POST_CREATE_CONTAINER}
)
"""The events that an observer subscribes to."""

MAX_ANNOTATION: Final = 253
"""Longest value of an annotation that is kept; most are single words, one is the path of a file."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod sandbox; `cpu` is from its own spec, `annotations` are those that are used anywhere.

    `pid` is the VMM's for Kata, 0 where the runtime does not send it (NRI before 0.12).
    """

    id: str
    name: str = ""
    namespace: str = ""
    uid: str = ""
    handler: str = ""
    pid: int = 0
    cgroups_path: str = ""
    cpu: CpuResources = _NO_CPU
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class PodContainer:
    """A container of a pod; `cpu` and `memory` (bytes) are from its spec and all updates so far.

    `pid` is 0 until the start, then for Kata the VMM's.
    """

    id: str
    pod_id: str
    name: str = ""
    state: ContainerState = ContainerState.CREATED
    cgroups_path: str = ""
    cpu: CpuResources = _NO_CPU
    memory: int | None = None
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `container` is None for events about pods.

    `asked` and `asked_memory` are what UpdateContainer would set; 0 and an empty text leave the
    value unchanged.
    """

    kind: EventKind
    pod: Pod
    container: PodContainer | None = None
    asked: CpuResources = _NO_CPU
    asked_memory: int | None = None


@dataclass(frozen=True, slots=True)
class Configuration:
    """The runtime's name, version, and NRI version (empty before 0.12), as Configure reports them.

    After `request_s` without an answer the runtime disconnects the plugin.
    """

    runtime: str
    version: str
    request_s: float
    nri: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All pods and their living containers (synchronize.py reads it)."""

    pods: tuple[Pod, ...] = ()
    containers: tuple[PodContainer, ...] = ()


# ---- reading ---------------------------------------------------------------------------------


def parse_configure(data: bytes) -> Configuration:
    """Read a ConfigureRequest; raises ParseError."""
    message = _parsed(proto.nri_pb2.ConfigureRequest(), data)
    timeout_ms = message.request_timeout
    if not 0 < timeout_ms <= MAX_TIMEOUT_MS:
        timeout_ms = REQUEST_MS
    return Configuration(
        message.runtime_name, message.runtime_version, timeout_ms / 1000, message.NRI_version
    )


def parse_event(method: str, data: bytes, kinds: Collection[EventKind] = OBSERVED) -> Event | None:
    """Read a request of the service Plugin; None unless it is an event of these kinds.

    Raises ParseError for an event that cannot be read.
    """
    if method == "StateChange":
        change = _parsed(proto.nri_pb2.StateChangeEvent(), data)
        known = change.event in kinds and change.event not in ASKED
        return _event(EventKind(change.event), change.pod, change.container) if known else None
    kind = _BY_METHOD.get(method)
    if kind is None or kind not in kinds:
        return None
    if kind is EventKind.UPDATE_CONTAINER:
        update = _parsed(proto.nri_pb2.UpdateContainerRequest(), data)
        event = _event(kind, update.pod, update.container)
        asked = update.linux_resources
        return replace(event, asked=_cpu(asked.cpu), asked_memory=_memory(asked.memory))
    request = _parsed(proto.nri_pb2.EventRequest(), data)
    return _event(kind, request.pod, request.container)


def _event(
    kind: EventKind, pod: proto.nri_pb2.PodSandbox, container: proto.nri_pb2.Container
) -> Event:
    of = pod_of(pod)
    if kind.of_pod:
        return Event(kind, of)
    found = container_of(container)
    if found.pod_id != of.id:
        raise ParseError(
            "the container belongs to another pod", source=f"NRI {kind.method}", text=found.id
        )
    return Event(kind, of, found)


def pod_of(message: proto.nri_pb2.PodSandbox) -> Pod:
    """Return a pod; ParseError for an id that is none, or a text that is too long."""
    return Pod(
        id=check_id(message.id, source="NRI pod"),
        name=_text(message.name, "name"),
        namespace=_text(message.namespace, "namespace"),
        uid=_text(message.uid, "uid"),
        handler=_text(message.runtime_handler, "handler"),
        pid=message.pid if message.pid <= MAX_PID else 0,
        cgroups_path=_text(message.linux.cgroups_path, "cgroups_path", _MAX_PATH),
        cpu=_cpu(message.linux.resources.cpu),
        annotations={
            key: message.annotations[key]
            for key in (*_ANNOTATIONS, *quiet_keys(message.annotations))
            if key in message.annotations and len(message.annotations[key]) <= MAX_ANNOTATION
        },
    )


def container_of(message: proto.nri_pb2.Container) -> PodContainer:
    """Return a container; ParseError for an id that is none, or a text that is too long."""
    return PodContainer(
        id=check_id(message.id, source="NRI container"),
        pod_id=check_id(message.pod_sandbox_id, source="NRI container's pod"),
        name=_text(message.name, "name"),
        state=_state(message.state),
        cgroups_path=_text(message.linux.cgroups_path, "cgroups_path", _MAX_PATH),
        cpu=_cpu(message.linux.resources.cpu),
        memory=_memory(message.linux.resources.memory),
        pid=message.pid if message.pid <= MAX_PID else 0,
    )


def _state(state: proto.nri_pb2.ContainerState) -> ContainerState:
    if state in {proto.nri_pb2.CONTAINER_RUNNING, proto.nri_pb2.CONTAINER_PAUSED}:
        return ContainerState.RUNNING
    stopped = state == proto.nri_pb2.CONTAINER_STOPPED
    return ContainerState.STOPPED if stopped else ContainerState.CREATED


def _text(text: str, name: str, limit: int = _MAX_NAME) -> str:
    if len(text) > limit:
        raise ParseError(f"longer than {limit} characters", source=f"NRI {name}")
    return text


def _cpu(message: proto.nri_pb2.LinuxCPU) -> CpuResources:
    return CpuResources(
        cpus=message.cpus[: MAX_TEXT + 1],  # one more than a cpu list may have, so it is refused
        mems=message.mems[: MAX_TEXT + 1],
        quota_us=kept(message.quota.value) if message.HasField("quota") else None,
        period_us=kept(message.period.value) if message.HasField("period") else None,
        shares=kept(message.shares.value) if message.HasField("shares") else None,
    )


def _memory(message: proto.nri_pb2.LinuxMemory) -> int | None:
    """Return the limit in bytes; None where there is none (containerd sends 0 for "unchanged")."""
    return message.limit.value if message.limit.value > 0 else None


def _parsed(message: M, data: bytes) -> M:
    return parsed(message, data, f"NRI {type(message).__name__}")


# ---- records ---------------------------------------------------------------------------------


def pod_record(pod: Pod, state: ContainerState, *, stamp_ns: int, source: str) -> Container:
    """Return the record of a pod's sandbox container; `stamp_ns` is CLOCK_BOOTTIME."""
    itself = PodContainer(pod.id, pod.id, cgroups_path=pod.cgroups_path, cpu=pod.cpu)
    kind = ContainerKind.SANDBOX
    return container_record(pod, itself, state, kind, stamp_ns=stamp_ns, source=source)


def container_record(
    pod: Pod,
    container: PodContainer,
    state: ContainerState,
    kind: ContainerKind = ContainerKind.CONTAINER,
    *,
    stamp_ns: int,
    source: str,
) -> Container:
    """Return the record of a container; `stamp_ns` is CLOCK_BOOTTIME."""
    names = {  # as in containerd's annotations
        "io.kubernetes.cri.container-name": container.name,
        "io.kubernetes.cri.sandbox-name": pod.name,
        "io.kubernetes.cri.sandbox-namespace": pod.namespace,
        "io.kubernetes.cri.sandbox-uid": pod.uid,
        "io.containerd.cri.runtime-handler": pod.handler,
    }
    return build(
        ContainerIds(container.id, pod.id, kind),
        names,
        container.cpu,
        state=state,
        bundle="",
        cgroups_path=container.cgroups_path,
        stamp_ns=stamp_ns,
        source=source,
        pid_hint=pod.pid,
    )
