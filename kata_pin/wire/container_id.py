"""Which container a hook speaks of, and the record made of it (DESIGN D4).

Kata's Go runtime sends the sandbox's id as `id` in poststart and poststop, so identity comes from
the bundle's path and the annotations of config.json and of the state. Four dialects of annotations
are known; they are tried in Kata's own order (src/runtime/pkg/oci/utils.go): containerd, CRI-O,
dockershim, then Kata's own, which names no sandbox. In a bundle of CRI-O's, CRI-O's come first.
Without any, the container is alone in its sandbox and both ids are one (docker, nerdctl, podman,
ctr).
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

MAX_SHOWN: Final = 40
"""Most characters of a foreign text in a note."""

CRIO_BUNDLE: Final = "/userdata"
"""How the paths of CRI-O's bundles end, and of podman's; containerd's never do."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which container; `note` says what did not fit together on the way to the answer."""

    container_id: str
    sandbox_id: str
    kind: ContainerKind
    note: str = ""


def identify(phase: Phase, state: OciState, config: OciConfig | None = None) -> Identity:
    """Return the container that a hook's message is about.

    `config` is the bundle's config.json, None when it could not be read (after poststop). Where
    both carry an annotation, config.json's counts. ParseError when an id cannot be one, or when a
    container of a pod names no sandbox.
    """
    notes: list[str] = []
    annotations = {**state.annotations, **(config.annotations if config else {})}
    dialects = _dialects(state.bundle)
    container_id = _container_id(state.bundle, annotations, notes, dialects)
    if not phase.id_is_sandbox and state.id != container_id:
        notes.append(f"state id {state.id[:MAX_SHOWN]!r} is not the bundle's")
    hint = state.id if phase.id_is_sandbox else ""
    return _place(container_id, annotations, hint, notes, dialects, unread=config is None)


def identify_annotated(
    container_id: str, annotations: Mapping[str, str], sandbox_id: str
) -> Identity:
    """Return who a container is whose id and sandbox are known already (persist.json)."""
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
    """Return the record of a hook's message.

    `stamp_ns` is the hook's CLOCK_BOOTTIME stamp; `source` defaults to `hook:<phase>`. `note` is
    put before the notes made here: what reading config.json met. A cpu list that cannot be read
    leaves the record without a cpuset, with a note. ParseError as for identify.
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
    identity: Identity,
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
    """Return a record from its parts; a name that cannot be one is left out, with a note."""
    notes = [part for part in (note, identity.note) if part]
    return Container(
        id=identity.container_id,
        sandbox_id=identity.sandbox_id,
        kind=identity.kind,
        state=state,
        cpus=_cpus(cpu.cpus, notes),
        mems=_mems(cpu.mems, notes),
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
    """Return the dialects in the order they are asked, by whose bundle it is.

    The marks of another container manager than the bundle's can only come from the pod's author,
    who may not choose what pod a container belongs to.
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
        notes.append(f"bundle names {by_path[:MAX_SHOWN]!r}")
    return named


def _place(
    container_id: str,
    annotations: Mapping[str, str],
    sandbox_hint: str,
    notes: list[str],
    dialects: tuple[Dialect, ...],
    *,
    unread: bool = False,
) -> Identity:
    for dialect in dialects:
        if dialect.type_key in annotations:
            kind, sandbox_id = _in_dialect(dialect, container_id, annotations, sandbox_hint, notes)
            break
    else:
        kind = ContainerKind.CONTAINER
        sandbox_id = _unmarked(container_id, annotations, sandbox_hint, unread=unread)
    return Identity(container_id, sandbox_id, kind, "; ".join(notes))


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
            notes.append(f"sandbox names {named[:MAX_SHOWN]!r} as its sandbox")
        sandbox_id = check_id(named or container_id, source=dialect.sandbox_key)
        return ContainerKind.SANDBOX, sandbox_id
    if value != dialect.container_value:
        notes.append(f"{dialect.type_key} is {value[:MAX_SHOWN]!r}")
    return ContainerKind.CONTAINER, check_id(named or sandbox_hint, source=dialect.sandbox_key)


def _unmarked(
    container_id: str, annotations: Mapping[str, str], sandbox_hint: str, *, unread: bool
) -> str:
    """Return the sandbox of a container that no container manager marked.

    Kata before 3.x marks a container that is alone `pod_sandbox`, later ones `single_container`:
    either way it is the workload itself and no pause container. A `pod_container` needs a sandbox,
    which the Go runtime names in poststart and poststop. So it does when config.json could not be
    read and the marks there are unknown (Kata 1.x passes no annotations in the state).
    """
    kata_type = annotations.get(KATA_TYPE)
    if kata_type == "pod_container" or (unread and kata_type is None and sandbox_hint):
        if not is_id(sandbox_hint):
            raise ParseError("container of a pod, but no sandbox id", source=KATA_TYPE)
        return sandbox_hint
    return container_id


def _cpus(text: str, notes: list[str]) -> CpuSet | None:
    if not text.strip():
        return None
    try:
        return CpuSet.parse(text, source="cpu.cpus")
    except ParseError as error:
        notes.append(str(error))
        return None


def _mems(text: str, notes: list[str]) -> str:
    try:
        return str(CpuSet.parse(text, source="cpu.mems"))
    except ParseError as error:
        notes.append(str(error))
        return ""


def _name(annotations: Mapping[str, str], keys: tuple[str, ...], notes: list[str]) -> str:
    for key in keys:
        value = annotations.get(key, "")
        if value:
            if is_name(value):
                return value
            notes.append(f"{key} is not a name: {value[:MAX_SHOWN]!r}")
    return ""
