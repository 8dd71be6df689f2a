"""NRI's messages that act: what a container gets at creation, and what others get beside it.

Only the CPUs and memory nodes of a cpuset are ever written (DESIGN D14, D20). An empty list means
"as it is" to every runtime, so a cpuset can be replaced and never be taken away. Rules of
containerd/nri (pkg/adaptation/result.go, pkg/api/update.go): the container being created may not
be in `update`, each container is in it once, and an update that may fail is dropped where another
plugin has set the same field instead of failing the request.

Out of scope: what to write (daemon), and when the runtime applies it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kata_pin.errors import ParseError
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.wire.proto import nri_pb2


@dataclass(frozen=True, slots=True)
class Cpuset:
    """A container's new cpuset; what is empty stays as it is."""

    cpus: CpuSet = EMPTY
    mems: CpuSet = EMPTY

    def __bool__(self) -> bool:
        return bool(self.cpus or self.mems)


@dataclass(frozen=True, slots=True)
class Update:
    """A change of another container; one that fails is dropped unless it `must` succeed."""

    container_id: str
    cpuset: Cpuset
    must: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an event: `adjust` is for the container being created only."""

    adjust: Cpuset = Cpuset()
    updates: tuple[Update, ...] = ()


def create_reply(answer: Answer) -> bytes:
    """Return a CreateContainerResponse; no bytes at all for an answer that changes nothing."""
    message = nri_pb2.CreateContainerResponse(update=_updates(answer.updates))
    if answer.adjust:
        _fill(message.adjust.linux.resources.cpu, answer.adjust)
    return bytes(message.SerializeToString())


def update_reply(updates: Iterable[Update]) -> bytes:
    """Return an UpdateContainerResponse or a StopContainerResponse, which are the same."""
    return bytes(nri_pb2.UpdateResponse(update=_updates(updates)).SerializeToString())


def synchronize_reply(updates: Iterable[Update]) -> bytes:
    """Return the answer to the last part of a Synchronize; earlier parts get none."""
    return bytes(nri_pb2.SynchronizeResponse(update=_updates(updates)).SerializeToString())


def update_request(updates: Iterable[Update]) -> bytes:
    """Return an UpdateContainersRequest, which the plugin sends unasked."""
    return bytes(nri_pb2.UpdateContainersRequest(update=_updates(updates)).SerializeToString())


def parse_update_response(data: bytes) -> frozenset[str]:
    """Return the containers that an UpdateContainersResponse says could not be updated.

    ParseError when it is none. containerd tells a failure by the call's status instead.
    """
    message = nri_pb2.UpdateContainersResponse()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ParseError(str(error), source="NRI UpdateContainersResponse") from error
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
