"""The one request of the Container Runtime Interface (CRI) that changes a cpuset.

Source: k8s.io/cri-api, pkg/apis/runtime/v1/api.proto. To containerd and CRI-O, 0 and an empty text
mean "unchanged", so only the cpuset is ever written. The call: sources/cri.py.
"""

from __future__ import annotations

from typing import Final

from kata_pin.wire.nri.replies import Cpuset
from kata_pin.wire.proto import crirequest_pb2

UPDATE_RESOURCES: Final = "/runtime.v1.RuntimeService/UpdateContainerResources"
"""The method, as gRPC names it. Its answer has no field."""


def update_resources_request(container_id: str, cpuset: Cpuset) -> bytes:
    """Return an UpdateContainerResourcesRequest that changes only a container's cpuset."""
    linux = crirequest_pb2.LinuxContainerResources(
        cpuset_cpus=str(cpuset.cpus), cpuset_mems=str(cpuset.mems)
    )
    message = crirequest_pb2.UpdateContainerResourcesRequest(container_id=container_id, linux=linux)
    return bytes(message.SerializeToString())
