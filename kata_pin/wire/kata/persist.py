"""What Kata keeps on disk about a sandbox: Go's persist.json and runtime-rs' state.json.

Go (src/runtime/virtcontainers/persist/api) rewrites /run/vc/sbs/<id>/persist.json in place at each
container event, not atomically: a ParseError can mean that it is half written, so read it again.
runtime-rs writes /run/kata/<id>/state.json once, without containers. Both files belong to root: a
pid in them is a witness in the sense of DESIGN D5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from kata_pin.model.sandbox import Container, ContainerKind, ContainerState
from kata_pin.wire.annotations import KATA_BUNDLE, KATA_TYPE, annotations_of
from kata_pin.wire.container_id import Identity, build, identify_annotated
from kata_pin.wire.ids import check_id
from kata_pin.wire.json_text import Fields, load_fields
from kata_pin.wire.oci import MAX_PID, CpuResources, parse_cpu

MAX_CONTAINERS: Final = 1024
MAX_HOTPLUGGED: Final = 4096

_NO_STATES: Final[Mapping[str, ContainerState]] = MappingProxyType({})


class KataRuntime(StrEnum):
    """Which of Kata's runtimes wrote the file."""

    GO = "go"
    RS = "rs"


@dataclass(frozen=True, slots=True)
class PersistedContainer:
    """A container of persist.json; `cpu` is the live value, updates merged in."""

    id: str
    cpu: CpuResources
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class PersistedSandbox:
    """A sandbox as Kata keeps it. Pids are 0 and texts empty where the file does not say.

    `vcpu_pinning` is Kata's own pinning (enable_vcpus_pinning), the second writer of DESIGN D13.
    `containers` holds all that are not deleted; runtime-rs keeps none.
    """

    runtime: KataRuntime
    sandbox_id: str = ""
    hypervisor: str = ""
    hypervisor_path: str = ""
    vmm_pid: int = 0
    virtiofsd_pid: int = 0
    hotplugged: tuple[str, ...] = ()
    max_vcpus: int = 0
    sandbox_cgroup: str = ""
    overhead_cgroup: str = ""
    sandbox_cgroup_only: bool = False
    vcpu_pinning: bool = False
    agent_url: str = ""
    containers: tuple[PersistedContainer, ...] = ()


def parse_persist(data: bytes) -> PersistedSandbox:
    """Read Go's persist.json of a sandbox, Kata 1.x to 3.x; ParseError names the member."""
    fields = load_fields(data, source="persist.json")
    hypervisor = fields.fields("HypervisorState")
    config = fields.fields("Config")
    machine = config.fields("HypervisorConfig")
    return PersistedSandbox(
        runtime=KataRuntime.GO,
        sandbox_id=fields.text("SandboxContainer"),
        hypervisor=hypervisor.text("Type") or config.text("HypervisorType"),
        hypervisor_path=machine.text("HypervisorPath"),
        vmm_pid=_pid(hypervisor, "Pid"),
        virtiofsd_pid=_pid(hypervisor, "VirtiofsDaemonPid") or _pid(hypervisor, "VirtiofsdPid"),
        hotplugged=tuple(
            entry.text("ID", limit=256)
            for entry in hypervisor.objects("HotpluggedVCPUs", limit=MAX_HOTPLUGGED)
        ),
        max_vcpus=machine.number("DefaultMaxVCPUs", 0, 1 << 32) or 0,
        sandbox_cgroup=fields.text("SandboxCgroupPath") or fields.text("CgroupPath"),
        overhead_cgroup=fields.text("OverheadCgroupPath"),
        sandbox_cgroup_only=config.flag("SandboxCgroupOnly"),
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
        hypervisor=hypervisor.text("hypervisor_type"),
        hypervisor_path=hypervisor.fields("config").text("path"),
        vmm_pid=_pid(hypervisor, "pid"),
        virtiofsd_pid=_pid(hypervisor, "virtiofs_daemon_pid"),
        sandbox_cgroup=cgroups.text("path"),
        overhead_cgroup=cgroups.text("overhead_path"),
        sandbox_cgroup_only=cgroups.flag("sandbox_cgroup_only"),
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
    """Return the records of containers that no hook told us about, or whose cpusets changed.

    `states` holds container_state by id, where it could be read; running is assumed otherwise.
    """
    return tuple(
        build(
            _identity(entry, sandbox),
            entry.annotations,
            entry.cpu,
            state=states.get(entry.id, ContainerState.RUNNING),
            bundle=entry.annotations.get(KATA_BUNDLE, ""),
            stamp_ns=stamp_ns,
            source=source,
        )
        for entry in sandbox.containers
    )


def _identity(entry: PersistedContainer, sandbox: PersistedSandbox) -> Identity:
    """Return who a container is.

    Kata 1.x keeps its own mark only, and `pod_sandbox` is its word for a container that is alone
    too: with others beside it, it is the pause container.
    """
    identity = identify_annotated(entry.id, entry.annotations, sandbox.sandbox_id)
    if entry.annotations.get(KATA_TYPE) == "pod_sandbox" and len(sandbox.containers) > 1:
        return replace(identity, kind=ContainerKind.SANDBOX)
    return identity


def _pid(fields: Fields, key: str) -> int:
    return fields.number(key, 0, MAX_PID) or 0
