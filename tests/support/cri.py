"""A small client of the Container Runtime Interface: what the kubelet would ask of containerd.

Pods are in the host's network, so no CNI is needed. Calls have deadlines and raise grpc.RpcError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from tests.support.proto import cri_pb2 as pb
from tests.support.waiting import SCALE

DEADLINE_S = 30.0 * SCALE
_SERVICE = "/runtime.v1.RuntimeService/"


class Cri:
    """One connection to a containerd; `cgroup` is the parent of all its pods."""

    def __init__(self, socket: Path, image: str, cgroup: str) -> None:
        options = [("grpc.default_authority", "localhost")]
        self._channel = grpc.insecure_channel(f"unix://{socket}", options=options)
        self._image = image
        self._cgroup = cgroup
        self._logs = str(socket.parent)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def run_pod(
        self, name: str, handler: str = "", annotations: Mapping[str, str] | None = None
    ) -> str:
        """Start a pod and return its sandbox id; a `name` may have a namespace before a slash."""
        request = pb.RunPodSandboxRequest(
            config=self._pod_config(name, annotations or {}), runtime_handler=handler
        )
        reply = self._call("RunPodSandbox", request, pb.RunPodSandboxResponse)
        return str(reply.pod_sandbox_id)

    def create(
        self,
        pod: str,
        name: str,
        *,
        pod_name: str,
        command: Sequence[str] = (),
        attempt: int = 0,
        **resources: Any,
    ) -> str:
        """Create a container; `resources` are fields of LinuxContainerResources.

        `attempt` counts its instances, as the kubelet does.
        """
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=name, attempt=attempt),
            image=pb.ImageSpec(image=self._image),
            command=command,
            log_path=f"{pod[:8]}-{name}.log",
            linux=pb.LinuxContainerConfig(resources=pb.LinuxContainerResources(**resources)),
        )
        request = pb.CreateContainerRequest(
            pod_sandbox_id=pod, config=config, sandbox_config=self._pod_config(pod_name, {})
        )
        return str(self._call("CreateContainer", request, pb.CreateContainerResponse).container_id)

    def start(self, container: str) -> None:
        """Start a created container."""
        self._call("StartContainer", pb.ContainerRequest(container_id=container), pb.Empty)

    def update(self, container: str, **resources: Any) -> None:
        """Change a container's resources."""
        request = pb.UpdateContainerResourcesRequest(
            container_id=container, linux=pb.LinuxContainerResources(**resources)
        )
        self._call("UpdateContainerResources", request, pb.Empty)

    def stop(self, container: str) -> None:
        """Stop a container at once."""
        self._call("StopContainer", pb.ContainerRequest(container_id=container), pb.Empty)

    def remove(self, container: str) -> None:
        """Remove a container."""
        self._call("RemoveContainer", pb.ContainerRequest(container_id=container), pb.Empty)

    def stop_pod(self, pod: str) -> None:
        """Stop a pod and its containers."""
        self._call("StopPodSandbox", pb.PodSandboxRequest(pod_sandbox_id=pod), pb.Empty)

    def remove_pod(self, pod: str) -> None:
        """Remove a pod and its containers."""
        self._call("RemovePodSandbox", pb.PodSandboxRequest(pod_sandbox_id=pod), pb.Empty)

    def answers(self) -> bool:
        """Whether the runtime serves."""
        try:
            self._call("Version", pb.Empty(), pb.Empty, deadline_s=1.0 * SCALE)
        except grpc.RpcError:
            return False
        return True

    def _pod_config(self, name: str, annotations: Mapping[str, str]) -> Any:
        namespace, _, plain = name.rpartition("/")
        node = pb.NamespaceOption(network=pb.NODE)
        return pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(
                name=plain, uid=f"uid-{plain}", namespace=namespace or "shop"
            ),
            log_directory=self._logs,
            annotations=dict(annotations),
            linux=pb.LinuxPodSandboxConfig(
                cgroup_parent=self._cgroup,
                security_context=pb.LinuxSandboxSecurityContext(namespace_options=node),
            ),
        )

    def _call(
        self, method: str, request: Any, reply: Callable[[], Any], deadline_s: float = DEADLINE_S
    ) -> Any:
        call = self._channel.unary_unary(
            _SERVICE + method,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,  # type: ignore[attr-defined]
        )
        return call(request, timeout=deadline_s)
