"""Kata's files: its configuration with drop-ins, and its state of a sandbox.

The Go runtime keeps persist.json, runtime-rs state.json.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from kata_pin.base.errors import ParseError, reason_of
from kata_pin.base.json_text import Fields, check_id, load_fields
from kata_pin.base.sandbox import Container
from kata_pin.base.toml_text import MAX_CHARACTERS, load
from kata_pin.base.values import ContainerKind, ContainerState, KataRuntime
from kata_pin.linux.owned_files import FileRefused, read_owned
from kata_pin.peers.oci import (
    KATA_BUNDLE,
    KATA_TYPE,
    MAX_PID,
    ContainerIds,
    CpuResources,
    annotations_of,
    build,
    identify_annotated,
    parse_cpu,
)

# Kata's configuration.toml: the settings that matter to kata-pin.
#
# They decide which VMM binaries are accepted (D5), whether Kata pins too (D13), whether an extra
# QMP monitor may exist (D6), and how a VM is sized.

MAX_PATHS: Final = 64
MAX_TABLES: Final = 16

_SOURCE: Final = "configuration.toml"
_MAX_VCPUS: Final = 1 << 16


class KataConfig(Struct, frozen=True):
    """One Kata configuration.

    `hypervisor` is the table's name (`qemu`, `clh`...). `valid_paths` may have glob patterns.
    `default_vcpus` may be a fraction since Kata 3.4; `default_maxvcpus` 0 means all CPUs of the
    host. `extra_monitor` has no effect without `debug`. runtime-rs has `overhead_vcpus` since 4.0;
    its files name the hypervisor in [runtime], those of the Go runtime do not. `hot_plug_vfio`:
    a VM that runs has a port for VFIO devices (the setting of that name; Kata's default is none).
    `template`: VMs of runtime-rs are copies of one (the Go runtime adds to its copies what they
    lack).
    """

    hypervisor: str = ""
    path: str = ""
    valid_paths: tuple[str, ...] = ()
    debug: bool = False
    extra_monitor: str = ""
    iothreads: bool = False
    default_vcpus: float = 0
    overhead_vcpus: float | None = None
    default_maxvcpus: int = 0
    vcpu_pinning: bool = False
    sandbox_cgroup_only: bool = False
    static_sizing: bool = False
    hot_plug_vfio: bool = False
    template: bool = False
    runtime: KataRuntime = KataRuntime.GO

    @property
    def binaries(self) -> tuple[str, ...]:
        """The VMM paths that this configuration allows, each once."""
        return tuple(dict.fromkeys(path for path in (self.path, *self.valid_paths) if path))


def parse_kata_config(text: str, drop_ins: Iterable[str] = ()) -> tuple[KataConfig, ...]:
    """Return one KataConfig per `[hypervisor.<name>]` table; raises ParseError.

    `drop_ins` are the texts of config.d in the order of their names; their keys override the
    file's. The table named by `[runtime] hypervisor_name` (runtime-rs) comes first.
    """
    document = load(text, source=_SOURCE)
    for drop_in in drop_ins:
        document = _merged(document, load(drop_in, source=_SOURCE))
    fields = Fields(document, source=_SOURCE)
    tables = fields.fields("hypervisor")
    runtime = fields.fields("runtime")
    chosen = runtime.text("hypervisor_name")
    names = sorted(tables.names[:MAX_TABLES], key=lambda name: name != chosen)
    return tuple(_config(name, tables.fields(name), runtime) for name in names)


def _merged(base: dict[str, object], over: dict[str, object]) -> dict[str, object]:
    """Return `base` with the keys of `over`; tables are merged, other values replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merged(old, value)
        else:
            merged[key] = value
    return merged


def _config(name: str, table: Fields, runtime: Fields) -> KataConfig:
    return KataConfig(
        hypervisor=name,
        path=table.text("path"),
        valid_paths=_paths(table, "valid_hypervisor_paths"),
        debug=table.flag("enable_debug"),
        extra_monitor=table.text("extra_monitor_socket"),
        iothreads=table.flag("enable_iothreads"),
        default_vcpus=_vcpus(table, "default_vcpus") or 0,
        overhead_vcpus=_vcpus(table, "overhead_vcpus"),
        default_maxvcpus=table.number("default_maxvcpus", 0, _MAX_VCPUS) or 0,
        vcpu_pinning=runtime.flag("enable_vcpus_pinning"),
        sandbox_cgroup_only=runtime.flag("sandbox_cgroup_only"),
        hot_plug_vfio=table.text("hot_plug_vfio") not in {"", "no-port"},
        static_sizing=runtime.flag("static_sandbox_resource_mgmt"),
        template=table.fields("factory").flag("enable_template"),
        runtime=KataRuntime.RUST if runtime.text("hypervisor_name") else KataRuntime.GO,
    )


def _paths(table: Fields, key: str) -> tuple[str, ...]:
    paths = table.items(key, limit=MAX_PATHS)
    for path in paths:
        if not isinstance(path, str) or len(path) > 4096:
            raise table.fail(key, "not a list of paths")
    return tuple(str(path) for path in paths)


def _vcpus(table: Fields, key: str) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise table.fail(key, "not a number")
    if not -_MAX_VCPUS <= value <= _MAX_VCPUS:  # negative: all CPUs of the host; also refuses nan
        raise table.fail(key, f"not within {-_MAX_VCPUS} to {_MAX_VCPUS}")
    return value


# Kata's configuration files of this node, read with their drop-ins.
#
# They are read at start, on reload and by doctor.
# They are often links (`configuration.toml` to the one for QEMU), so links are followed to the end
# before the file's owner is checked.

PATTERNS: Final = ("configuration*.toml", "*/configuration*.toml", "*/*/configuration*.toml")
"""Names below a folder: Kata's own, those in runtime-rs/, and kata-deploy's runtimes/<name>/."""

MAX_FILES: Final = 64


class KataConfigFile(Struct, frozen=True):
    """One file: its resolved path, its hypervisor tables, or why it cannot be read."""

    path: str
    configs: tuple[KataConfig, ...] = ()
    problem: str = ""


def read_kata_configs(folders: Iterable[str]) -> tuple[KataConfigFile, ...]:
    """Return every configuration in the folders (setting paths.kata_configs), each file once.

    A file that cannot be read or parsed is in the result with its problem; the others still count.
    """
    found = dict.fromkeys(
        os.path.realpath(path)
        for folder in folders
        for pattern in PATTERNS
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), pattern)))
    )
    return tuple(read_kata_config(path) for path in list(found)[:MAX_FILES])


def read_kata_config(path: str) -> KataConfigFile:
    """Return one configuration with its drop-ins; `path` has no links, as Kata resolves them."""
    try:
        return KataConfigFile(path, parse_kata_config(text_of(path), map(text_of, drop_ins(path))))
    except (FileRefused, ParseError) as error:
        return KataConfigFile(path, problem=str(error))
    except OSError as error:
        return KataConfigFile(path, problem=reason_of(error))


def drop_ins(path: str) -> Iterator[str]:
    """Yield the paths in config.d beside the file, in the order of their names: Kata reads all."""
    folder = os.path.join(os.path.dirname(path), "config.d")
    yield from sorted(glob.glob(os.path.join(glob.escape(folder), "*")))[:MAX_FILES]


def text_of(path: str) -> str:
    """Return a file of Kata's, through its links; raises FileRefused and OSError."""
    return read_owned(os.path.realpath(path), MAX_CHARACTERS).decode("utf-8", "replace")


# Kata's state of a sandbox on disk: persist.json of the Go runtime, state.json of runtime-rs.
#
# Go (src/runtime/virtcontainers/persist/api) rewrites /run/vc/sbs/<id>/persist.json in place at
# each container event, so a ParseError can mean that it is half written: read it again. runtime-rs
# writes /run/kata/<id>/state.json once, without containers. Both files belong to root, so a pid in
# them is a witness (D5).

MAX_CONTAINERS: Final = 1024

_NO_STATES: Final[Mapping[str, ContainerState]] = MappingProxyType({})


class PersistedContainer(Struct, frozen=True):
    """A container of persist.json; `cpu` includes updates."""

    id: str
    cpu: CpuResources
    annotations: Mapping[str, str] = field(default_factory=dict)


class PersistedSandbox(Struct, frozen=True):
    """Kata's state of a sandbox; pids are 0 and texts empty where the file does not have them.

    `vcpu_pinning` is Kata's own pinning (enable_vcpus_pinning, D13). `factory_vm` is what the Go
    runtime's factory named the VM. `containers` are all that are not deleted; runtime-rs stores
    none.
    """

    runtime: KataRuntime
    sandbox_id: str = ""
    vmm_pid: int = 0
    virtiofsd_pid: int = 0
    vcpu_pinning: bool = False
    factory_vm: str = ""
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
        factory_vm=config.fields("HypervisorConfig").text("VMid"),
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
        runtime=KataRuntime.RUST,
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
