"""What is used of the Container Runtime Interface (CRI): changing resources, listing containers.

Source: k8s.io/cri-api, pkg/apis/runtime/v1/api.proto. To containerd and CRI-O, 0 and an empty text
mean "unchanged", so only what is decided is ever written. The calls: sources/cri.py.
"""

from __future__ import annotations

from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.sandbox import ContainerState
from kata_pin.wire import proto
from kata_pin.wire.ids import check_id
from kata_pin.wire.nri.messages import MAX_CONTAINERS
from kata_pin.wire.nri.replies import Cpuset
from kata_pin.wire.ttrpc import parsed

UPDATE_RESOURCES: Final = "/runtime.v1.RuntimeService/UpdateContainerResources"
"""The method, as gRPC names it. Its answer has no field."""

LIST_CONTAINERS: Final = "/runtime.v1.RuntimeService/ListContainers"
"""The method, as gRPC names it. Without a filter its request has no field."""

_STATES: Final = {0: ContainerState.CREATED, 2: ContainerState.STOPPED}
"""By the enum ContainerState; the others are running (1) and unknown (3)."""


def update_resources_request(container_id: str, cpuset: Cpuset) -> bytes:
    """Return an UpdateContainerResourcesRequest for a container's cpuset and limits only."""
    limits = cpuset.limits
    linux = proto.crirequest_pb2.LinuxContainerResources(
        cpuset_cpus=str(cpuset.cpus),
        cpuset_mems=str(cpuset.mems),
        cpu_shares=limits.shares or 0,
        cpu_quota=limits.quota_us or 0,
        cpu_period=limits.period_us or 0,
        memory_limit_in_bytes=limits.memory or 0,
    )
    message = proto.crirequest_pb2.UpdateContainerResourcesRequest(
        container_id=container_id, linux=linux
    )
    return bytes(message.SerializeToString())


def parse_containers(data: bytes) -> dict[str, ContainerState]:
    """Return the state of each container of a ListContainersResponse by id; raises ParseError.

    An unknown state is `running`: the container may run. Labels and annotations are not kept.
    """
    message = parsed(proto.crirequest_pb2.ListContainersResponse(), data, "CRI ListContainers")
    if len(message.containers) > MAX_CONTAINERS:
        raise ParseError(f"more than {MAX_CONTAINERS} containers", source="CRI ListContainers")
    return {
        check_id(one.id, source="CRI container"): _STATES.get(one.state, ContainerState.RUNNING)
        for one in message.containers
    }
