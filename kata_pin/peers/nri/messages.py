"""NRI's messages, version v1alpha1: what the runtime reports.

The runtime (containerd, CRI-O) calls the service Plugin; the plugin calls the service Runtime to
register. Source: github.com/containerd/nri, pkg/api/api.proto and pkg/adaptation. From NRI 0.12
on each event has its own method; before that, events that a plugin cannot influence come as
StateChange with a number. Both become an Event here. What the plugin sends: replies.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import Struct, field
from msgspec.structs import fields, replace

from kata_pin.base.allocation import ANNOTATIONS, DeviceNode
from kata_pin.base.cpuset import MAX_TEXT
from kata_pin.base.errors import ParseError
from kata_pin.base.json_text import check_id
from kata_pin.base.sandbox import Container
from kata_pin.base.values import ContainerKind, ContainerState
from kata_pin.peers import proto
from kata_pin.peers.oci import (
    KATA_CONFIG,
    KATA_PINNING,
    MAX_PID,
    ContainerIds,
    CpuResources,
    build,
    kept,
    quiet_keys,
)
from kata_pin.peers.ttrpc import parsed

if TYPE_CHECKING:
    from google.protobuf.message import Message


PLUGIN_SERVICE: Final = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE: Final = "nri.pkg.api.v1alpha1.Runtime"
MAX_PODS: Final = 4096
MAX_CONTAINERS: Final = 16384
"""Most that a node is believed to have; the kubelet's limit is 110 pods unless raised."""

MAX_DEVICES: Final = 32
"""Most devices that are taken for a container's own."""

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


class Pod(Struct, frozen=True):
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
    annotations: Mapping[str, str] = field(default_factory=dict)


class PodContainer(Struct, frozen=True):
    """A container of a pod; `cpu` and `memory` (bytes) are from its spec and all updates so far.

    `pid` is 0 until the start, then for Kata the VMM's. `devices` are those of its spec.
    """

    id: str
    pod_id: str
    name: str = ""
    state: ContainerState = ContainerState.CREATED
    cgroups_path: str = ""
    cpu: CpuResources = _NO_CPU
    memory: int | None = None
    pid: int = 0
    devices: tuple[DeviceNode, ...] = ()


class Event(Struct, frozen=True):
    """One event; `container` is None for events about pods.

    `asked` and `asked_memory` are what UpdateContainer would set; 0 and an empty text leave the
    value unchanged.
    """

    kind: EventKind
    pod: Pod
    container: PodContainer | None = None
    asked: CpuResources = _NO_CPU
    asked_memory: int | None = None


class Configuration(Struct, frozen=True):
    """The runtime's name, version, and NRI version (empty before 0.12), as Configure reports them.

    After `request_s` without an answer the runtime disconnects the plugin.
    """

    runtime: str
    version: str
    request_s: float
    nri: str = ""


class Snapshot(Struct, frozen=True):
    """All pods and their living containers."""

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
        devices=_devices(message.linux),
    )


def _devices(message: proto.nri_pb2.LinuxContainer) -> tuple[DeviceNode, ...]:
    """Return a container's own devices; none for a privileged one, which has all of the host's."""
    if len(message.devices) > MAX_DEVICES:
        return ()
    return tuple(
        DeviceNode(_text(one.path, "device", _MAX_PATH), one.type, one.major, one.minor)
        for one in message.devices
        if one.type in {"c", "b"} and one.major >= 0 and one.minor >= 0
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


# NRI's Synchronize: all pods and containers of now, in one message or in parts.
#
# A decoded pod or container takes fifty times the room of the two bytes that it may have on the
# wire, and what is kept of the parts adds up, so both are bounded: the fields of a part are counted
# before it is decoded, and the parts together have as many pods, containers and characters as a
# node may have. Source: github.com/containerd/nri, pkg/adaptation/plugin.go, synchronize.

MAX_PARTS: Final = 256
"""Most messages of one Synchronize."""

MAX_BYTES: Final = 128 * 1024 * 1024
"""Most bytes of all parts: 4,096 pods with 32 KiB each."""

MAX_CHARACTERS: Final = 8 * 1024 * 1024
"""Most characters of names, ids, paths and cpusets that are kept: 500 in each container."""

MAX_FIELDS: Final = 50_000
"""Most fields of one part and of the pods in it; each annotation is one."""

SYNCHRONIZE_MAX_DEVICES: Final = 200_000
"""Most devices of one part: a privileged container has all of the host's."""

_SOURCE: Final = "NRI Synchronize"
_PODS: Final = 1
_CONTAINERS: Final = 2
_LINUX: Final = 11
_DEVICES: Final = 2

Kept = TypeVar("Kept", Pod, PodContainer)


class SnapshotParts:
    """Collects the parts of one Synchronize."""

    def __init__(self) -> None:
        self._pods: list[Pod] = []
        self._containers: list[PodContainer] = []
        self._parts = self._bytes = self._characters = 0

    def __bool__(self) -> bool:
        return self._parts > 0

    def feed(self, data: bytes) -> Snapshot | None:
        """Take one part; return the snapshot after the last one, None if more follow.

        Raises ParseError for what is no SynchronizeRequest, and for more than a node may have.
        """
        self._parts += 1
        self._bytes += len(data)
        if self._parts > MAX_PARTS:
            raise ParseError(f"more than {MAX_PARTS} parts", source=_SOURCE)
        if self._bytes > MAX_BYTES:
            raise ParseError(f"more than {MAX_BYTES} bytes", source=_SOURCE)
        self._check_counts(data)
        message = parsed(proto.nri_pb2.SynchronizeRequest(), data, _SOURCE)
        for pod in message.pods:
            self._pods.append(self._kept(pod_of(pod)))
        for container in message.containers:
            self._containers.append(self._kept(container_of(container)))
        return None if message.more else Snapshot(tuple(self._pods), tuple(self._containers))

    def _check_counts(self, data: bytes) -> None:
        """Count what a part holds without decoding it."""
        pods, containers, counted, devices = len(self._pods), len(self._containers), 0, 0
        for number, body in _fields(memoryview(data)):
            pods += number == _PODS
            containers += number == _CONTAINERS
            counted += 1
            if number == _PODS:
                counted += sum(1 for _ in islice(_fields(body), MAX_FIELDS))
            if number == _CONTAINERS:
                devices += sum(
                    1 for _ in islice(_synchronize_devices(body), SYNCHRONIZE_MAX_DEVICES + 1)
                )
            if devices > SYNCHRONIZE_MAX_DEVICES:
                raise ParseError(
                    f"more than {SYNCHRONIZE_MAX_DEVICES} devices in one part", source=_SOURCE
                )
            if pods > MAX_PODS or containers > MAX_CONTAINERS:
                text = f"more than {MAX_PODS} pods or {MAX_CONTAINERS} containers are too many"
                raise ParseError(text, source=_SOURCE)
            if counted > MAX_FIELDS:
                raise ParseError(f"more than {MAX_FIELDS} fields in one part", source=_SOURCE)

    def _kept(self, one: Kept) -> Kept:
        """Return what is kept of a part, after counting its characters."""
        texts = (getattr(one, entry.name) for entry in fields(one))
        self._characters += sum(len(text) for text in texts if isinstance(text, str))
        self._characters += len(one.cpu.cpus) + len(one.cpu.mems)
        if self._characters > MAX_CHARACTERS:
            raise ParseError(f"names of more than {MAX_CHARACTERS} characters", source=_SOURCE)
        return one


def _synchronize_devices(container: memoryview) -> Iterator[memoryview]:
    """Yield the devices of a container."""
    for number, body in _fields(container):
        if number == _LINUX:
            yield from (device for inner, device in _fields(body) if inner == _DEVICES)


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the bytes of each field of a message; raises ParseError."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        size = 0
        match tag & 7:
            case 0:
                _, after = _varint(data, at)
                size = after - at
            case 1:
                size = 8
            case 2:
                size, at = _varint(data, at)
            case 5:
                size = 4
            case _:  # the groups of proto2
                raise ParseError("not a message of proto3", source=_SOURCE)
        if at + size > end:
            raise ParseError("cut short", source=_SOURCE)
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number of variable length and where it ends."""
    value = shift = 0
    for byte in data[at : at + 10]:
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ParseError("cut short", source=_SOURCE)


# Which runtimes may be sent unsolicited updates (NRI's UpdateContainers).
#
# containerd took two locks in the wrong order: such an update during any event could hang every pod
# operation of the node (containerd/containerd#13733). containerd/nri v0.12.1 no longer takes one of
# them (pkg/adaptation/adaptation.go, updateContainers); containerd has it since 2.4.0. Other
# runtimes are not known to be safe, so they get none.

RUNTIME: Final = "containerd"
SAFE: Final = (2, 4, 0)
SAFE_NRI: Final = (0, 12, 1)

_VERSION: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?:([-+~.]).{0,80})?", re.ASCII)


def updates_problem(runtime: Configuration) -> str:
    """Return why a runtime may not be sent unsolicited updates, empty if it may.

    An unreadable version is not safe, nor is a pre-release of the first safe one.
    """
    if runtime.runtime != RUNTIME:
        return "only containerd is known to handle unsolicited updates safely"
    version = _parsed_version(runtime.version)
    if version is None:
        return "cannot read containerd's version"
    if version < (*SAFE, True):
        return f"containerd before {_version_text(SAFE)} can deadlock on unsolicited updates"
    nri = _parsed_version(runtime.nri)
    if nri is not None and nri < (*SAFE_NRI, True):
        return f"NRI before {_version_text(SAFE_NRI)} can deadlock on unsolicited updates"
    return ""


def _parsed_version(text: str) -> tuple[int, ...] | None:
    """Return a version's three numbers, and whether it is the release itself.

    A suffix makes it a pre-release, except for build metadata (`+`).
    """
    match = _VERSION.fullmatch(text)
    if match is None:
        return None
    return (*(int(number) for number in match.group(1, 2, 3)), match[4] in {None, "+"})


def _version_text(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)
