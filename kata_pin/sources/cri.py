"""Changing a container's cpuset through CRI, as the kubelet's CPU manager does, and listing states.

With NRI the runtime reports our own update to us before it makes it, so nothing here may be called
while the runtime waits for our answer.

A status proves nothing about the runtime: Kata passes on what the agent in the guest answered, so a
tenant may have chosen it. Only the socket shows whether the runtime is there (grpc_socket.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.calls import DIRECT, Calls
from kata_pin.model.sandbox import ContainerState
from kata_pin.sources.grpc_socket import CallRefused, GrpcSocket, SocketUnusable
from kata_pin.sources.updater import (
    DEADLINE_S,
    SLOW,
    ContainerUnknown,
    RuntimeUnavailable,
    UpdateRefused,
)
from kata_pin.wire.kube.cri import (
    LIST_CONTAINERS,
    UPDATE_RESOURCES,
    parse_containers,
    update_resources_request,
)
from kata_pin.wire.nri.replies import Cpuset


@dataclass(frozen=True)
class CriClient:
    """Calls one runtime; nothing is kept between calls."""

    path: str
    deadline_s: float = DEADLINE_S
    calls: Calls = DIRECT

    @property
    def problem(self) -> str:
        """Why no call can be made at all, empty if calls are possible."""
        return self._socket.problem

    async def update(self, container_id: str, cpuset: Cpuset) -> None:
        """Change a container's cpuset; see Updater."""
        await self._called(UPDATE_RESOURCES, update_resources_request(container_id, cpuset))

    async def containers(self) -> dict[str, ContainerState]:
        """Return the states of all containers by id; raises as `update`, and ParseError."""
        return parse_containers(await self._called(LIST_CONTAINERS, b""))

    async def _called(self, name: str, request: bytes) -> bytes:
        """Make a call and return its answer."""
        try:
            return await self._socket.call(name, request)
        except SocketUnusable as error:
            raise RuntimeUnavailable(error.message) from error
        except CallRefused as error:
            if error.code == "NOT_FOUND":
                text = f"the runtime does not know the container: {error.message}"
                raise ContainerUnknown(text) from error
            slow = error.code == "DEADLINE_EXCEEDED"
            raise UpdateRefused(SLOW.format(self.deadline_s) if slow else error.message) from error

    @property
    def _socket(self) -> GrpcSocket:
        return GrpcSocket(self.path, self.deadline_s, self.calls)
