"""Kata's state of a sandbox on disk: persist.json of the Go runtime, state.json of runtime-rs.

Go (src/runtime/virtcontainers/persist/api) rewrites /run/vc/sbs/<id>/persist.json in place at each
container event, so a ParseError can mean that it is half written: read it again. runtime-rs writes
/run/kata/<id>/state.json once, without containers. Both files belong to root, so a pid in them is a
witness (D5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from kata_pin.model.sandbox import Container, ContainerKind, ContainerState
from kata_pin.wire.annotations import KATA_BUNDLE, KATA_TYPE, annotations_of
from kata_pin.wire.container_id import ContainerIds, build, identify_annotated
from kata_pin.wire.ids import check_id
from kata_pin.wire.json_text import Fields, load_fields
from kata_pin.wire.oci import MAX_PID, CpuResources, parse_cpu

MAX_CONTAINERS: Final = 1024

_NO_STATES: Final[Mapping[str, ContainerState]] = MappingProxyType({})


class KataRuntime(StrEnum):
    """Which of Kata's runtimes wrote the file."""

    GO = "go"
    RS = "rs"


@dataclass(frozen=True, slots=True)
class PersistedContainer:
    """A container of persist.json; `cpu` includes updates."""

    id: str
    cpu: CpuResources
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class PersistedSandbox:
    """Kata's state of a sandbox; pids are 0 and texts empty where the file does not have them.

    `vcpu_pinning` is Kata's own pinning (enable_vcpus_pinning, D13). `containers` are all that are
    not deleted; runtime-rs stores none.
    """

    runtime: KataRuntime
    sandbox_id: str = ""
    vmm_pid: int = 0
    virtiofsd_pid: int = 0
    vcpu_pinning: bool = False
    agent_url: str = ""
    containers: tuple[PersistedContainer, ...] = ()

    def lists_all_of(self, sandbox_id: str) -> bool:
        """Whether a container that is not listed is deleted.

        Only in a whole document of this very sandbox: Go's runtime names the container that the
        sandbox was started with, and lists it until the sandbox itself is deleted.
        """
        names = self.runtime is KataRuntime.GO and self.sandbox_id == sandbox_id
        return names and any(one.id == sandbox_id for one in self.containers)


def parse_persist(data: bytes) -> PersistedSandbox:
    """Read Go's persist.json of a sandbox, Kata 1.x to 3.x; ParseError names the member."""
    fields = load_fields(data, source="persist.json")
    hypervisor = fields.fields("HypervisorState")
    config = fields.fields("Config")
    return PersistedSandbox(
        runtime=KataRuntime.GO,
        sandbox_id=fields.text("SandboxContainer"),
        vmm_pid=_pid(hypervisor, "Pid"),
        virtiofsd_pid=_pid(hypervisor, "VirtiofsDaemonPid") or _pid(hypervisor, "VirtiofsdPid"),
        vcpu_pinning=config.flag("EnableVCPUsPinning"),
        agent_url=fields.fields("AgentState").text("URL"),
        containers=tuple(
            _container(entry) for entry in config.objects("ContainerConfigs", limit=MAX_CONTAINERS)
        ),
    )


def _container(fields: Fields) -> PersistedContainer:
    return PersistedContainer(
        id=check_id(fields.text("ID"), source="persist.json: ContainerConfigs"),
        annotations=annotations_of(fields, "Annotations"),
        cpu=parse_cpu(fields.fields("Resources").fields("cpu")),
    )


def parse_rs_state(data: bytes) -> PersistedSandbox:
    """Read runtime-rs' state.json; for QEMU its pids are absent (hypervisor/src/qemu/inner.rs)."""
    fields = load_fields(data, source="state.json")
    cgroups = fields.fields("resource").fields("cgroup_state")
    hypervisor = fields.fields("hypervisor")
    return PersistedSandbox(
        runtime=KataRuntime.RS,
        sandbox_id=hypervisor.text("id"),
        vmm_pid=_pid(hypervisor, "pid"),
        virtiofsd_pid=_pid(hypervisor, "virtiofs_daemon_pid"),
        vcpu_pinning=cgroups.flag("enable_vcpus_pinning"),
    )


def container_state(data: bytes) -> ContainerState:
    """Read the state in Go's persist.json of one container (sbs/<sandbox>/<container>)."""
    word = load_fields(data, source="persist.json").text("State")
    if word in ("running", "paused"):
        return ContainerState.RUNNING
    return ContainerState.STOPPED if word == "stopped" else ContainerState.CREATED


def to_containers(
    sandbox: PersistedSandbox,
    *,
    states: Mapping[str, ContainerState] = _NO_STATES,
    stamp_ns: int = 0,
    source: str = "adopted",
) -> tuple[Container, ...]:
    """Return the records of a sandbox's containers.

    `states` has container_state by id where it could be read; the others count as running.
    """
    return tuple(
        build(
            _ids(entry, sandbox),
            entry.annotations,
            entry.cpu,
            state=states.get(entry.id, ContainerState.RUNNING),
            bundle=entry.annotations.get(KATA_BUNDLE, ""),
            stamp_ns=stamp_ns,
            source=source,
        )
        for entry in sandbox.containers
    )


def _ids(entry: PersistedContainer, sandbox: PersistedSandbox) -> ContainerIds:
    """Return a container's ids.

    Kata 1.x stores only its own mark, and marks a single container `pod_sandbox` too; with other
    containers beside it, it is the pause container.
    """
    ids = identify_annotated(entry.id, entry.annotations, sandbox.sandbox_id)
    if entry.annotations.get(KATA_TYPE) == "pod_sandbox" and len(sandbox.containers) > 1:
        return replace(ids, kind=ContainerKind.SANDBOX)
    return ids


def _pid(fields: Fields, key: str) -> int:
    return fields.number(key, 0, MAX_PID) or 0
