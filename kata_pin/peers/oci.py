"""The state that a runtime passes to hooks, and the container's config.

Annotations tell which container of which sandbox it is (D4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct, field

from kata_pin.base.allocation import RDT_KEY
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.base.json_text import Fields, check_id, is_id, is_name, load_fields
from kata_pin.base.sandbox import Container
from kata_pin.base.values import ContainerKind, ContainerState

# The annotations that are read from an OCI state, config.json and persist.json.
#
# A pod's author may set any others, up to 256 KiB in all (Kubernetes API,
# TotalAnnotationSizeLimitB). Those are ignored, so that neither their number nor their content can
# hide a container.


class Dialect(NamedTuple):
    """How one container manager marks sandboxes and containers."""

    type_key: str
    sandbox_key: str
    sandbox_value: str = "sandbox"


CONTAINERD: Final = Dialect("io.kubernetes.cri.container-type", "io.kubernetes.cri.sandbox-id")
CRIO: Final = Dialect("io.kubernetes.cri-o.ContainerType", "io.kubernetes.cri-o.SandboxID")
DOCKERSHIM: Final = Dialect("io.kubernetes.docker.type", "io.kubernetes.sandbox.id", "podsandbox")
DIALECTS: Final = (CONTAINERD, CRIO, DOCKERSHIM)

CRIO_CONTAINER_ID: Final = "io.kubernetes.cri-o.ContainerID"
KATA_TYPE: Final = "io.katacontainers.pkg.oci.container_type"
KATA_BUNDLE: Final = "io.katacontainers.pkg.oci.bundle_path"
KATA_CONFIG: Final = "io.katacontainers.config_path"

KATA_PINNING: Final = (
    "io.katacontainers.enable_vcpus_pinning",
    "io.katacontainers.config.runtime.enable_vcpus_pinning",
)
"""Kata's own pinning: the key of the Go runtime, and that of runtime-rs."""

# The first key present wins: containerd's, then the labels that CRI-O and dockershim copy.
NAME_KEYS: Final = (
    "io.kubernetes.cri.container-name",
    "io.kubernetes.container.name",
    "io.kubernetes.cri-o.ContainerName",
    "nerdctl/name",
)
POD_KEYS: Final = (
    "io.kubernetes.cri.sandbox-name",
    "io.kubernetes.pod.name",
    "io.kubernetes.cri-o.KubeName",
)
NAMESPACE_KEYS: Final = (
    "io.kubernetes.cri.sandbox-namespace",
    "io.kubernetes.pod.namespace",
    "io.kubernetes.cri-o.Namespace",
)
UID_KEYS: Final = ("io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid")
HANDLER_KEYS: Final = ("io.containerd.cri.runtime-handler", "io.kubernetes.cri-o.RuntimeHandler")

IRQ_KEY: Final = "irq-load-balancing.crio.io"
"""Also with `/` and a container's name behind it."""

QUIET_KEYS: Final = (
    *("cpu-quiet.kata-pin.io", IRQ_KEY),
    *("cpu-c-states.crio.io", "cpu-freq-governor.crio.io"),
)
"""Whether the pCPUs of a pod should be quiet, their idle states and their frequency."""

_MAX_PREFIXED: Final = 64

READ: Final = (
    *(key for dialect in DIALECTS for key in (dialect.type_key, dialect.sandbox_key)),
    *(CRIO_CONTAINER_ID, KATA_TYPE, KATA_BUNDLE, KATA_CONFIG, *KATA_PINNING),
    *(*NAME_KEYS, *POD_KEYS, *NAMESPACE_KEYS, *UID_KEYS, *HANDLER_KEYS),
    *(*QUIET_KEYS, RDT_KEY),
)
"""All keys that are looked up anywhere; a new one must be added here."""


def annotations_of(fields: Fields, member: str) -> dict[str, str]:
    """Return the annotations in READ; ParseError if one of them is not a text."""
    found = fields.fields(member)
    return found.chosen((*READ, *quiet_keys(found.names)))


def quiet_keys(names: Iterable[str]) -> list[str]:
    """Return the keys among these that are about quiet pCPUs, at most 64 of single containers."""
    single = f"{IRQ_KEY}/"
    return [name for name in names if name in QUIET_KEYS or name.startswith(single)][:_MAX_PREFIXED]


# The state that a runtime passes to hooks, and the container's config.json.
#
# Sources: OCI runtime-spec (state, hooks, config-linux), and what Kata's two runtimes really send:
# `ociVersion` and `status` may be empty (src/runtime/pkg/katautils/hook.go), `id` may be another
# container's.

MAX_PID = 1 << 22  # largest pid of Linux on 64 bits (proc_sys_kernel(5), pid_max)

MAX_KEPT = (1 << 63) - 1
"""Largest number that is kept: SQLite's limit. OCI's shares and period go beyond."""

_MAX_U64 = (1 << 64) - 1

_LIST_LIMIT = 64 * 1024
"""More than CpuSet.parse takes, so that it reports a long list, and the rest is still read."""


class Phase(StrEnum):
    """The OCI hook phases that run on the host (runtime-spec, POSIX-platform hooks)."""

    PRESTART = "prestart"
    CREATE_RUNTIME = "createRuntime"
    CREATE_CONTAINER = "createContainer"
    POSTSTART = "poststart"
    POSTSTOP = "poststop"

    @property
    def state(self) -> ContainerState:
        """The container's state once this phase has been reported."""
        return _STATES.get(self, ContainerState.CREATED)

    @property
    def waits_for_pins(self) -> bool:
        """Whether the hook waits for the pins, because the workload has not run yet (D3)."""
        return self in (Phase.PRESTART, Phase.CREATE_RUNTIME)

    @property
    def id_is_sandbox(self) -> bool:
        """Whether Kata's Go runtime puts the sandbox's id into `id` (D4)."""
        return self in (Phase.POSTSTART, Phase.POSTSTOP)


_STATES = {Phase.POSTSTART: ContainerState.RUNNING, Phase.POSTSTOP: ContainerState.DELETED}


class OciState(Struct, frozen=True):
    """The state on a hook's stdin. `pid` is a hint: 0, the VMM, or a thread of the shim."""

    id: str
    bundle: str
    pid: int = 0
    status: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)


class CpuResources(Struct, frozen=True):
    """`linux.resources.cpu` of the OCI runtime spec; the lists are the original texts."""

    cpus: str = ""
    mems: str = ""
    quota_us: int | None = None
    period_us: int | None = None
    shares: int | None = None


class OciConfig(Struct, frozen=True):
    """The members of config.json that kata-pin uses."""

    annotations: Mapping[str, str] = field(default_factory=dict)
    cpu: CpuResources = CpuResources()
    cgroups_path: str = ""


def parse_state(data: bytes) -> OciState:
    """Read a hook's stdin; ParseError names the wrong member.

    `bundle` must be an absolute path without `..` (Kata always sends one); every other member may
    be absent or empty.
    """
    fields = load_fields(data, source="state")
    return OciState(
        id=fields.text("id"),
        bundle=_bundle(fields),
        pid=fields.number("pid", 0, MAX_PID) or 0,
        status=fields.text("status"),
        annotations=annotations_of(fields, "annotations"),
    )


def parse_config(data: bytes) -> OciConfig:
    """Read a bundle's config.json; ParseError names the wrong member."""
    fields = load_fields(data, source="config.json")
    linux = fields.fields("linux")
    return OciConfig(
        annotations=annotations_of(fields, "annotations"),
        cpu=parse_cpu(linux.fields("resources").fields("cpu")),
        cgroups_path=linux.text("cgroupsPath"),
    )


def parse_cpu(fields: Fields) -> CpuResources:
    """Read a `linux.resources.cpu` object; the CPU lists stay texts, so an invalid one may pass."""
    return CpuResources(
        cpus=fields.text("cpus", limit=_LIST_LIMIT),
        mems=fields.text("mems", limit=_LIST_LIMIT),
        quota_us=fields.number("quota", -MAX_KEPT, MAX_KEPT),
        period_us=kept(fields.number("period", 0, _MAX_U64)),
        shares=kept(fields.number("shares", 0, _MAX_U64)),
    )


def kept(number: int | None) -> int | None:
    """Return the nearest number that can be stored; sizes beyond MAX_KEPT all mean the same."""
    return None if number is None else max(-MAX_KEPT, min(number, MAX_KEPT))


def _bundle(fields: Fields) -> str:
    text = fields.need("bundle").text("bundle")
    parts = text.split("/")
    if not text.startswith("/") or ".." in parts:
        raise fields.fail("bundle", "not an absolute path without ..", text)
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ParseError("control character in path", source="state: bundle", text=text)
    return "/" + "/".join(part for part in parts if part not in ("", "."))


# Which container a hook's message is about, and its record (D4).
#
# Kata's Go runtime sends the sandbox's id as `id` in poststart and poststop, so the ids come from
# the bundle's path and from the annotations of config.json and the state. Four dialects of
# annotations are tried in Kata's own order (src/runtime/pkg/oci/utils.go): containerd, CRI-O,
# dockershim, then Kata's own, which names no sandbox. In a CRI-O bundle, CRI-O's come first.
# Without any, the container is alone in its sandbox and both ids are the same (docker, nerdctl,
# podman, ctr).

MAX_SHOWN: Final = 40  # most characters of a foreign text in a note

CRIO_BUNDLE: Final = "/userdata"
"""The end of bundle paths of CRI-O and podman; containerd's never end like this."""


class ContainerIds(Struct, frozen=True):
    """A container and its sandbox; `note` says which sources contradicted each other."""

    container_id: str
    sandbox_id: str
    kind: ContainerKind
    note: str = ""


def identify(phase: Phase, state: OciState, config: OciConfig | None = None) -> ContainerIds:
    """Return the container that a hook's message is about.

    `config` is the bundle's config.json, None if it could not be read (after poststop); its
    annotations override the state's. ParseError for an invalid id, or a container of a pod that
    names no sandbox.
    """
    notes: list[str] = []
    annotations = {**state.annotations, **(config.annotations if config else {})}
    dialects = _dialects(state.bundle)
    container_id = _container_id(state.bundle, annotations, notes, dialects)
    if not phase.id_is_sandbox and state.id != container_id:
        notes.append(f"the state's id {state.id[:MAX_SHOWN]!r} differs from the bundle's")
    hint = state.id if phase.id_is_sandbox else ""
    return _place(container_id, annotations, hint, notes, dialects, unread=config is None)


def identify_annotated(
    container_id: str, annotations: Mapping[str, str], sandbox_id: str
) -> ContainerIds:
    """Return the ids of a container listed by Kata under its sandbox (persist.json)."""
    checked = check_id(container_id, source="container id")
    dialects = _dialects(annotations.get(KATA_BUNDLE, ""))
    return _place(checked, annotations, sandbox_id, [], dialects)


def record(
    phase: Phase,
    state: OciState,
    config: OciConfig | None,
    *,
    stamp_ns: int,
    source: str = "",
    note: str = "",
) -> Container:
    """Return the record of a hook's message; ParseError as for identify.

    `stamp_ns` is the hook's CLOCK_BOOTTIME stamp; `source` defaults to `hook:<phase>`. `note` is
    put before the notes made here. An invalid CPU list leaves the record without a cpuset, and is
    noted.
    """
    annotations = {**state.annotations, **(config.annotations if config else {})}
    return build(
        identify(phase, state, config),
        annotations,
        config.cpu if config else CpuResources(),
        state=phase.state,
        bundle=state.bundle,
        cgroups_path=config.cgroups_path if config else "",
        stamp_ns=stamp_ns,
        source=source or f"hook:{phase.value}",
        pid_hint=state.pid,
        note=note,
    )


def build(
    ids: ContainerIds,
    annotations: Mapping[str, str],
    cpu: CpuResources,
    *,
    state: ContainerState,
    bundle: str,
    cgroups_path: str = "",
    stamp_ns: int = 0,
    source: str = "",
    pid_hint: int = 0,
    note: str = "",
) -> Container:
    """Return a record from its parts; an invalid name is left out, and noted."""
    notes = [part for part in (note, ids.note) if part]
    return Container(
        id=ids.container_id,
        sandbox_id=ids.sandbox_id,
        kind=ids.kind,
        state=state,
        cpus=_cpus(cpu.cpus, "cpu.cpus", notes),
        mems=str(_cpus(cpu.mems, "cpu.mems", notes) or ""),
        quota_us=cpu.quota_us,
        period_us=cpu.period_us,
        shares=cpu.shares,
        cgroups_path=cgroups_path,
        name=_name(annotations, NAME_KEYS, notes),
        pod_name=_name(annotations, POD_KEYS, notes),
        pod_namespace=_name(annotations, NAMESPACE_KEYS, notes),
        pod_uid=_name(annotations, UID_KEYS, notes),
        handler=_name(annotations, HANDLER_KEYS, notes),
        bundle=bundle,
        source=source,
        recorded_ns=stamp_ns,
        pid_hint=pid_hint,
        note="; ".join(notes),
    )


def _dialects(bundle: str) -> tuple[Dialect, ...]:
    """Return the dialects in the order in which they are tried, by the bundle's path.

    Annotations of another container manager than the bundle's come from the pod's author, who may
    not choose which pod a container belongs to.
    """
    return (CRIO, CONTAINERD, DOCKERSHIM) if bundle.endswith(CRIO_BUNDLE) else DIALECTS


def _container_id(
    bundle: str, annotations: Mapping[str, str], notes: list[str], dialects: tuple[Dialect, ...]
) -> str:
    parts = bundle.split("/")
    by_path = parts[-2] if parts[-1] == "userdata" and len(parts) > 1 else parts[-1]
    foreign = dialects[0] is CONTAINERD and CONTAINERD.type_key in annotations
    named = "" if foreign else annotations.get(CRIO_CONTAINER_ID, "")
    if not named:
        return check_id(by_path, source="bundle")
    check_id(named, source=CRIO_CONTAINER_ID)
    if named != by_path:
        notes.append(f"the bundle's path names container {by_path[:MAX_SHOWN]!r}")
    return named


def _place(
    container_id: str,
    annotations: Mapping[str, str],
    sandbox_hint: str,
    notes: list[str],
    dialects: tuple[Dialect, ...],
    *,
    unread: bool = False,
) -> ContainerIds:
    for dialect in dialects:
        if dialect.type_key in annotations:
            kind, sandbox_id = _in_dialect(dialect, container_id, annotations, sandbox_hint, notes)
            break
    else:
        kind = ContainerKind.CONTAINER
        sandbox_id = _unmarked(container_id, annotations, sandbox_hint, unread=unread)
    return ContainerIds(container_id, sandbox_id, kind, "; ".join(notes))


def _in_dialect(
    dialect: Dialect,
    container_id: str,
    annotations: Mapping[str, str],
    sandbox_hint: str,
    notes: list[str],
) -> tuple[ContainerKind, str]:
    value = annotations[dialect.type_key]
    named = annotations.get(dialect.sandbox_key, "")
    if value == dialect.sandbox_value:
        if named not in ("", container_id):
            notes.append(f"the sandbox container names another sandbox {named[:MAX_SHOWN]!r}")
        sandbox_id = check_id(named or container_id, source=dialect.sandbox_key)
        return ContainerKind.SANDBOX, sandbox_id
    if value != "container":
        notes.append(f"{dialect.type_key} is {value[:MAX_SHOWN]!r}")
    return ContainerKind.CONTAINER, check_id(named or sandbox_hint, source=dialect.sandbox_key)


def _unmarked(
    container_id: str, annotations: Mapping[str, str], sandbox_hint: str, *, unread: bool
) -> str:
    """Return the sandbox of a container without a container manager's annotations.

    Kata before 3.x marks a single container as `pod_sandbox`, later ones as `single_container`:
    either way it is the workload and not a pause container. A `pod_container` needs a sandbox,
    which the Go runtime sends in poststart and poststop. That also counts if config.json could not
    be read, because the annotations are unknown then (Kata 1.x sends none in the state).
    """
    kata_type = annotations.get(KATA_TYPE)
    if kata_type == "pod_container" or (unread and kata_type is None and sandbox_hint):
        if not is_id(sandbox_hint):
            raise ParseError("a container of a pod without a sandbox id", source=KATA_TYPE)
        return sandbox_hint
    return container_id


def _cpus(text: str, member: str, notes: list[str]) -> CpuSet | None:
    """Return a set of CPUs or memory nodes, None if the text is empty or invalid."""
    try:
        return CpuSet.parse(text, source=member) or None
    except ParseError as error:
        notes.append(str(error))
        return None


def _name(annotations: Mapping[str, str], keys: tuple[str, ...], notes: list[str]) -> str:
    for key in keys:
        value = annotations.get(key, "")
        if value:
            if is_name(value):
                return value
            notes.append(f"{key} is not a valid name: {value[:MAX_SHOWN]!r}")
    return ""
