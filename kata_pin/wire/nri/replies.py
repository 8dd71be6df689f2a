"""What the NRI plugin sends: its registration, and changes of containers' cpusets.

Only the CPUs and memory nodes of a cpuset are ever written (D14, D20). To every runtime an empty
list means "unchanged", so a cpuset can be replaced but never removed. Rules of containerd/nri
(pkg/adaptation/result.go, pkg/api/update.go): `update` may not have the container being created,
and has each container once; where another plugin has set the same field, an update that may fail is
dropped instead of failing the request. Out of scope: what to write (daemon).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.wire.nri.messages import OBSERVED, EventKind
from kata_pin.wire.proto import nri_pb2
from kata_pin.wire.ttrpc import parsed

VERSION: Final = "v0.12.0"
"""The version of NRI that we register with: each event has its own method."""


@dataclass(frozen=True, slots=True)
class Cpuset:
    """A container's new cpuset; an empty part leaves it unchanged."""

    cpus: CpuSet = EMPTY
    mems: CpuSet = EMPTY

    def __bool__(self) -> bool:
        return bool(self.cpus or self.mems)


@dataclass(frozen=True, slots=True)
class Update:
    """A change of another container; unless it `must` succeed, a failing one is dropped."""

    container_id: str
    cpuset: Cpuset
    must: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an event: `adjust` is for the container being created only."""

    adjust: Cpuset = Cpuset()
    updates: tuple[Update, ...] = ()


def register_request(name: str, index: str) -> bytes:
    """Return a RegisterPluginRequest; `index` has two digits."""
    message = nri_pb2.RegisterPluginRequest(plugin_name=name, plugin_idx=index, NRI_version=VERSION)
    return bytes(message.SerializeToString())


def configure_reply(kinds: Iterable[EventKind] = OBSERVED) -> bytes:
    """Return a ConfigureResponse that subscribes to these events.

    All versions since 0.2 know them; a runtime refuses a plugin that subscribes to an unknown one.
    """
    events = sum(1 << (kind - 1) for kind in kinds)
    return bytes(nri_pb2.ConfigureResponse(events=events).SerializeToString())


def create_reply(answer: Answer) -> bytes:
    """Return a CreateContainerResponse, empty for an answer that changes nothing."""
    message = nri_pb2.CreateContainerResponse(update=_updates(answer.updates))
    if answer.adjust:
        _fill(message.adjust.linux.resources.cpu, answer.adjust)
    return bytes(message.SerializeToString())


def update_reply(answer: Answer) -> bytes:
    """Return an UpdateContainerResponse or StopContainerResponse, which look the same."""
    return bytes(nri_pb2.UpdateResponse(update=_updates(answer.updates)).SerializeToString())


def synchronize_reply(updates: Iterable[Update] = (), *, more: bool = False) -> bytes:
    """Return a SynchronizeResponse; to a part with `more` to follow, one with `more` as well."""
    message = nri_pb2.SynchronizeResponse(update=_updates(updates), more=more)
    return bytes(message.SerializeToString())


def update_request(updates: Iterable[Update]) -> bytes:
    """Return an UpdateContainersRequest, which the plugin sends at a time of its choice."""
    return bytes(nri_pb2.UpdateContainersRequest(update=_updates(updates)).SerializeToString())


def parse_update_response(data: bytes) -> frozenset[str]:
    """Return the containers that could not be updated; raises ParseError.

    containerd reports a failure in the call's status instead.
    """
    response = nri_pb2.UpdateContainersResponse()
    message = parsed(response, data, "NRI UpdateContainersResponse")
    return frozenset(one.container_id for one in message.failed)


def _updates(updates: Iterable[Update]) -> list[nri_pb2.ContainerUpdate]:
    return [_update(one) for one in updates if one.cpuset]


def _update(update: Update) -> nri_pb2.ContainerUpdate:
    message = nri_pb2.ContainerUpdate(
        container_id=update.container_id, ignore_failure=not update.must
    )
    _fill(message.linux.resources.cpu, update.cpuset)
    return message


def _fill(cpu: nri_pb2.LinuxCPU, cpuset: Cpuset) -> None:
    cpu.cpus, cpu.mems = str(cpuset.cpus), str(cpuset.mems)
