"""Which container a hook's message is about, and its record (D4).

Kata's Go runtime sends the sandbox's id as `id` in poststart and poststop, so the ids come from the
bundle's path and from the annotations of config.json and the state. Four dialects of annotations
are tried in Kata's own order (src/runtime/pkg/oci/utils.go): containerd, CRI-O, dockershim, then
Kata's own, which names no sandbox. In a CRI-O bundle, CRI-O's come first. Without any, the
container is alone in its sandbox and both ids are the same (docker, nerdctl, podman, ctr).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.sandbox import Container, ContainerKind, ContainerState
from kata_pin.wire.annotations import (
    CONTAINERD,
    CRIO,
    CRIO_CONTAINER_ID,
    DIALECTS,
    DOCKERSHIM,
    HANDLER_KEYS,
    KATA_BUNDLE,
    KATA_TYPE,
    NAME_KEYS,
    NAMESPACE_KEYS,
    POD_KEYS,
    UID_KEYS,
    Dialect,
)
from kata_pin.wire.ids import check_id, is_id, is_name
from kata_pin.wire.oci import CpuResources, OciConfig, OciState, Phase

MAX_SHOWN: Final = 40  # most characters of a foreign text in a note

CRIO_BUNDLE: Final = "/userdata"
"""The end of bundle paths of CRI-O and podman; containerd's never end like this."""


@dataclass(frozen=True, slots=True)
class ContainerIds:
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
