"""A container runtime at a node: it tells NRI of pods, and keeps each container's cpuset.

    async with runtime_of(node) as runtime:
        db = runtime.pod("db", "exclusive")
        await runtime.run(db, 2)
        assert runtime.cpus["c-db"] == "1-2"

`cpus` is what the runtime has applied: what it was answered, and what it was sent unasked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from tests.boundary.host import PERIOD_US
from tests.boundary.node import Node
from tests.support.nriruntime import Peer, Runtime, pb

CLASS: Final = "cpu-policy.kata-pin.io"
FAIL: Final = "cpu-policy-fail.kata-pin.io"

SAFE: Final = "v2.4.0"
"""A containerd that accepts updates at any time."""
OLD: Final = "v2.3.0"

RUNNING: Final = pb.ContainerState.Value("CONTAINER_RUNNING")
STOPPED: Final = pb.ContainerState.Value("CONTAINER_STOPPED")


class Refused(Exception):  # noqa: N818 - what a test expects
    """The plugin refused an event."""


class ContainerRuntime:
    """One runtime and the plugin that is connected to it."""

    def __init__(self, node: Node, listening: Runtime) -> None:
        self.node = node
        self.cpus: dict[str, str] = {}
        self.containers: dict[str, pb.Container] = {}
        self.pods: dict[str, pb.PodSandbox] = {}
        self.adjusted: dict[str, pb.ContainerAdjustment] = {}
        self.pushed: list[tuple[str, str]] = []
        self.answer_push: Callable[[str, str], bytes | None] = lambda _id, _cpus: b""
        """What an update sent unasked is answered with; None: refused."""
        self._listening = listening
        self._peer: Peer | None = None

    @property
    def peer(self) -> Peer:
        """The connected plugin."""
        assert self._peer is not None
        return self._peer

    async def connect(self, version: str = OLD) -> None:
        """Take the plugin that connects next, and tell it everything there is."""
        self._peer = await self._listening.plugin()
        await self.peer.registered()
        await self.peer.configure(version)
        message = pb.SynchronizeRequest(pods=self.pods.values(), containers=self._listed())
        reply = pb.SynchronizeResponse.FromString(
            (await self.peer.call("Synchronize", message)).payload
        )
        self._apply(reply.update)

    def disconnect(self) -> None:
        """Hang up, as a runtime does that is restarted."""
        self.peer.writer.close()

    def pod(self, name: str, cpu_class: str = "", *, kata: bool = True, **fields: Any) -> str:
        """Start a pod, of a VM or of another runtime; return its id, which is its name."""
        pid = self.node.vm(name).pid if kata else self.node.host.process("pause")
        annotations = ({CLASS: cpu_class} if cpu_class else {}) | fields.pop("annotations", {})
        known: dict[str, Any] = {"id": name, "name": name, "namespace": "shop", "pid": pid}
        known |= {"uid": f"uid-{name}", "runtime_handler": "kata" if kata else ""}
        self.pods[name] = pb.PodSandbox(**(known | {"annotations": annotations} | fields))
        return name

    # ---- events ---------------------------------------------------------------------------

    async def create(self, pod: str, limit: int = 0, name: str = "", **fields: Any) -> str:
        """Create a container and return its cpuset; `limit` is its CPU limit and request.

        `app` is its name in the pod: one of the same name is its next instance.
        Raises Refused.
        """
        container_id = name or f"c-{pod}"
        given = fields.pop("cpus", "")
        container = self._made(pod, container_id, limit, given, **fields)
        message = pb.EventRequest(pod=self.pods[pod], container=container)
        answer = pb.CreateContainerResponse.FromString(await self._call("CreateContainer", message))
        self.adjusted[container_id] = answer.adjust
        self.cpus[container_id] = answer.adjust.linux.resources.cpu.cpus or given
        self.containers[container_id] = container
        self._apply(answer.update)
        return self.cpus[container_id]

    def there(self, pod: str, limit: int, cpus: str, **fields: Any) -> None:
        """Have a running container that a plugin hears of when it connects."""
        container_id = f"c-{pod}"
        made = self._made(pod, container_id, limit, cpus, state=RUNNING, **fields)
        self.containers[container_id] = made
        self.cpus[container_id] = cpus

    async def created(self, container_id: str, cpus: str | None = None) -> None:
        """Tell that a container is made; `cpus` is what another plugin gave it."""
        if cpus is not None:
            self.cpus[container_id] = cpus
        await self.tell("PostCreateContainer", container_id)

    async def make(self, pod: str, limit: int = 0, name: str = "", **fields: Any) -> str:
        """Create a container with success; return its cpuset."""
        cpus = await self.create(pod, limit, name, **fields)
        await self.created(name or f"c-{pod}")
        return cpus

    async def run(self, pod: str, limit: int = 0, name: str = "", **fields: Any) -> str:
        """Create and start a container; return the cpuset of its creation."""
        cpus = await self.make(pod, limit, name, **fields)
        container_id = name or f"c-{pod}"
        await self.tell("StartContainer", container_id)
        self.containers[container_id].state = RUNNING
        await self.tell("PostStartContainer", container_id)
        return cpus

    async def resize(self, container_id: str, limit: int) -> None:
        """Give a running container another limit, as an in-place resize does."""
        size = pb.LinuxCPU(**self._size(limit))
        self._apply(await self._updated(container_id, size))
        self.containers[container_id].linux.resources.cpu.MergeFrom(size)
        await self.tell("PostUpdateContainer", container_id)

    async def update(self, container_id: str, cpus: str) -> dict[str, str]:
        """Tell that somebody gives a container a cpuset; return what the answer gives to whom."""
        answer = await self._updated(container_id, pb.LinuxCPU(cpus=cpus))
        return {one.container_id: one.linux.resources.cpu.cpus for one in answer}

    async def stop(self, container_id: str) -> None:
        """Stop a container."""
        container = self.containers[container_id]
        container.state = STOPPED
        pod = self.pods[container.pod_sandbox_id]
        message = pb.EventRequest(pod=pod, container=self._now(container_id))
        payload = await self._call("StopContainer", message)
        self._apply(pb.UpdateResponse.FromString(payload).update)

    async def remove(self, container_id: str) -> None:
        """Remove a container."""
        await self.tell("RemoveContainer", container_id)
        del self.containers[container_id], self.cpus[container_id]

    async def end(self, container_id: str) -> None:
        """Stop a container and remove it."""
        await self.stop(container_id)
        await self.remove(container_id)

    async def end_pod(self, pod: str, *, removed: bool = True) -> None:
        """Stop a pod, and remove it."""
        for method in ("StopPodSandbox", "RemovePodSandbox")[: 1 + removed]:
            await self._call(method, pb.EventRequest(pod=self.pods[pod]))
        if removed:
            del self.pods[pod]

    # ---- what is sent unasked ---------------------------------------------------------------

    async def take_pushes(self, **cpus: str) -> None:
        """Answer what is sent unasked until containers (`c_web` for c-web) have these cpusets."""
        wanted = {name.replace("_", "-"): value for name, value in cpus.items()}
        try:
            async with asyncio.timeout(10):
                while self.cpus | wanted != self.cpus:
                    await self.take_push()
        except TimeoutError:
            raise AssertionError(f"containers have {self.cpus}, not {wanted}") from None

    async def take_push(self) -> tuple[str, str]:
        """Answer what is sent unasked next; return the container and its cpuset."""
        stream, container_id, cpus = await self.peer.update()
        self.pushed.append((container_id, cpus))
        answer = self.answer_push(container_id, cpus)
        if answer is None:
            self.peer.reply(stream, code=2, why="busy")
        else:
            self.cpus[container_id] = cpus
            self.peer.reply(stream, answer)
        return container_id, cpus

    # ---- parts ------------------------------------------------------------------------------

    def _made(
        self, pod: str, container_id: str, limit: int, cpus: str, **fields: Any
    ) -> pb.Container:
        cpu = pb.LinuxCPU(cpus=cpus, **self._size(limit, quota=fields.pop("quota", True)))
        linux = pb.LinuxContainer(
            resources=pb.LinuxResources(cpu=cpu),
            cgroups_path=f"/kubepods/pod{pod}/{container_id}",
            devices=fields.pop("devices", ()),
        )
        app = fields.pop("app", "app")
        known = {"id": container_id, "pod_sandbox_id": pod, "name": app, "linux": linux}
        return pb.Container(**(known | fields))

    @staticmethod
    def _size(limit: int, *, quota: bool = True) -> dict[str, Any]:
        if not limit:
            return {}
        size = {"shares": pb.OptionalUInt64(value=limit * 1024)}
        if quota:
            size |= {
                "quota": pb.OptionalInt64(value=limit * PERIOD_US),
                "period": pb.OptionalUInt64(value=PERIOD_US),
            }
        return size

    def _now(self, container_id: str) -> pb.Container:
        container = pb.Container()
        container.CopyFrom(self.containers[container_id])
        container.linux.resources.cpu.cpus = self.cpus[container_id]
        return container

    def _listed(self) -> list[pb.Container]:
        return [self._now(container_id) for container_id in self.containers]

    async def tell(self, method: str, container_id: str) -> None:
        """Tell of an event that needs no answer."""
        container = self._now(container_id)
        pod = self.pods[container.pod_sandbox_id]
        await self._call(method, pb.EventRequest(pod=pod, container=container))

    async def _call(self, method: str, message: Any) -> bytes:
        response = await self.peer.call(method, message)
        if response.code:
            raise Refused(response.message)
        return response.payload

    async def _updated(self, container_id: str, cpu: pb.LinuxCPU) -> Any:
        message = pb.UpdateContainerRequest(
            pod=self.pods[self.containers[container_id].pod_sandbox_id],
            container=self._now(container_id),
            linux_resources=pb.LinuxResources(cpu=cpu),
        )
        return pb.UpdateResponse.FromString(await self._call("UpdateContainer", message)).update

    def _apply(self, updates: Any) -> None:
        for one in updates:
            self.cpus[one.container_id] = one.linux.resources.cpu.cpus


@asynccontextmanager
async def runtime_of(
    node: Node, version: str = OLD, **alloc: Any
) -> AsyncIterator[ContainerRuntime]:
    """Have a runtime listen at a node that decides cpusets, and start its daemon."""
    decides = {
        "policy": "annotation",
        "eligibility": "relaxed",
        "allow": [{"namespace": "*"}],
    } | alloc
    nri = {"enabled": "yes", "socket": str(node.folder / "nri.sock")}
    node.change(nri=nri, alloc=decides)
    async with Runtime(node.folder / "nri.sock") as listening:
        runtime = ContainerRuntime(node, listening)
        async with node:
            await runtime.connect(version)
            yield runtime
