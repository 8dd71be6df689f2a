"""What the NRI plugin sends: its registration, and changes of containers' resources.

Only what a decision names is ever written (D14, D20). To every runtime an empty list and 0 mean
"unchanged", so a cpuset can be replaced but never removed. An update has the cpuset and the limits
only: containerd changes nothing else of a running container, and adds a hugepage limit to its spec
each time (internal/cri/nri, toCRIResources). Rules of containerd/nri (pkg/adaptation/result.go,
pkg/api/update.go): `update` may not have the container being created, and has each container once;
where another plugin has set the same field, an update that may fail is dropped instead of failing
the request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from kata_pin.base.allocation import NO_LIMITS, NOTHING_MORE, AtCreation, Device, Limits
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.peers import proto
from kata_pin.peers.nri.messages import OBSERVED, EventKind
from kata_pin.peers.ttrpc import encoded, parsed

VERSION: Final = "v0.12.0"
"""The version of NRI that we register with: each event has its own method."""


class Cpuset(Struct, frozen=True):
    """A container's new cpuset, with its new limits; an empty part leaves it unchanged."""

    cpus: CpuSet = EMPTY
    mems: CpuSet = EMPTY
    limits: Limits = NO_LIMITS

    def __bool__(self) -> bool:
        return self.confines or bool(self.limits)

    @property
    def confines(self) -> bool:
        """Whether it names CPUs or memory nodes."""
        return bool(self.cpus or self.mems)

    def confined_as(self, other: Cpuset | None) -> bool:
        """Whether another one has the same CPUs and memory nodes."""
        return other is not None and (self.cpus, self.mems) == (other.cpus, other.mems)

    def over(self, before: Cpuset) -> Cpuset:
        """Return what a container has after an update: what is empty stays."""
        return Cpuset(
            self.cpus or before.cpus, self.mems or before.mems, self.limits.over(before.limits)
        )


class Update(Struct, frozen=True):
    """A change of another container; unless it `must` succeed, a failing one is dropped."""

    container_id: str
    cpuset: Cpuset
    must: bool = False


class NriAnswer(Struct, frozen=True):
    """The answer to an event: `adjust` and `creation` are for the container being created only."""

    adjust: Cpuset = Cpuset()
    updates: tuple[Update, ...] = ()
    creation: AtCreation = NOTHING_MORE


def register_request(name: str, index: str) -> bytes:
    """Return a RegisterPluginRequest; `index` has two digits."""
    message = proto.nri_pb2.RegisterPluginRequest(
        plugin_name=name, plugin_idx=index, NRI_version=VERSION
    )
    return encoded(message)


def configure_reply(kinds: Iterable[EventKind] = OBSERVED) -> bytes:
    """Return a ConfigureResponse that subscribes to these events.

    All versions since 0.2 know them; a runtime refuses a plugin that subscribes to an unknown one.
    """
    events = sum(1 << (kind - 1) for kind in kinds)
    return encoded(proto.nri_pb2.ConfigureResponse(events=events))


def create_reply(answer: NriAnswer) -> bytes:
    """Return a CreateContainerResponse, empty for an answer that changes nothing."""
    message = proto.nri_pb2.CreateContainerResponse(update=_updates(answer.updates))
    if answer.adjust:
        _fill(message.adjust.linux.resources, answer.adjust)
    if answer.creation:
        _create(message.adjust, answer.creation)
    return encoded(message)


def update_reply(answer: NriAnswer) -> bytes:
    """Return an UpdateContainerResponse or StopContainerResponse, which look the same."""
    return encoded(proto.nri_pb2.UpdateResponse(update=_updates(answer.updates)))


def synchronize_reply(updates: Iterable[Update] = (), *, more: bool = False) -> bytes:
    """Return a SynchronizeResponse; to a part with `more` to follow, one with `more` as well."""
    return encoded(proto.nri_pb2.SynchronizeResponse(update=_updates(updates), more=more))


def update_request(updates: Iterable[Update]) -> bytes:
    """Return an UpdateContainersRequest, which the plugin sends at a time of its choice."""
    return encoded(proto.nri_pb2.UpdateContainersRequest(update=_updates(updates)))


def parse_update_response(data: bytes) -> frozenset[str]:
    """Return the containers that could not be updated; raises ParseError.

    containerd reports a failure in the call's status instead.
    """
    response = proto.nri_pb2.UpdateContainersResponse()
    message = parsed(response, data, "NRI UpdateContainersResponse")
    return frozenset(one.container_id for one in message.failed)


def _updates(updates: Iterable[Update]) -> list[proto.nri_pb2.ContainerUpdate]:
    return [_update(one) for one in updates if one.cpuset]


def _update(update: Update) -> proto.nri_pb2.ContainerUpdate:
    message = proto.nri_pb2.ContainerUpdate(
        container_id=update.container_id, ignore_failure=not update.must
    )
    _fill(message.linux.resources, update.cpuset)
    return message


def _fill(
    resources: proto.nri_pb2.LinuxResources | proto.nri_pb2.AdjustedResources, cpuset: Cpuset
) -> None:
    cpu, limits = resources.cpu, cpuset.limits
    cpu.cpus, cpu.mems = str(cpuset.cpus), str(cpuset.mems)
    if limits.shares is not None:
        cpu.shares.value = limits.shares
    if limits.quota_us is not None:
        cpu.quota.value = limits.quota_us
    if limits.period_us is not None:
        cpu.period.value = limits.period_us
    if limits.memory is not None:
        resources.memory.limit.value = limits.memory


def _create(adjust: proto.nri_pb2.ContainerAdjustment, creation: AtCreation) -> None:
    resources = adjust.linux.resources
    for size, limit in creation.hugepages:
        resources.hugepage_limits.add(page_size=size, limit=limit)
    if creation.rdt_class:
        resources.rdt_class.value = creation.rdt_class
    if creation.blockio_class:
        resources.blockio_class.value = creation.blockio_class
    for name, value in creation.env:
        adjust.env.add(key=name, value=value)
    for mount in creation.mounts:
        adjust.mounts.add(
            destination=mount.destination, type="bind", source=mount.source, options=_MOUNTED
        )
    for device in creation.devices:
        _add_device(adjust.linux, device)
    for name, value in creation.annotations:
        adjust.annotations[name] = value


def _add_device(linux: proto.nri_pb2.LinuxContainerAdjustment, device: Device) -> None:
    """Add a device and its rule.

    NRI makes a rule of its own from the file's mode (pkg/runtime-tools/generate, AdjustDevices);
    where another one is wanted, two more replace it, because the last one counts.
    """
    added = linux.devices.add(
        path=device.path, type=device.kind, major=device.major, minor=device.minor
    )
    added.file_mode.value = device.mode
    if device.access == _implied_access(device):
        return
    for allow, access in ((False, "rwm"), (True, device.access)):
        rule = linux.resources.devices.add(allow=allow, type=device.kind, access=access)
        rule.major.value, rule.minor.value = device.major, device.minor


def _implied_access(device: Device) -> str:
    """Return the rule that NRI makes for a device (pkg/api/device.go, AccessString).

    It starts from "rw" and never takes anything away.
    """
    return "rwm" if device.kind == "b" else "rw"


_MOUNTED: Final = ("bind", "ro", "nosuid", "nodev", "noexec", "rprivate")
"""Options of every mount."""
