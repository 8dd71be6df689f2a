"""A container's record as a row of the registry; what is kept when a later record has less."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kata_pin.errors import ParseError, StateError
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.sandbox import Container, ContainerKind, ContainerState

FIELDS: Final = (
    "id", "sandbox_id", "kind", "state", "cpus", "mems", "quota_us", "period_us", "shares",
    "cgroups_path", "name", "pod_name", "pod_namespace", "pod_uid", "handler", "bundle", "source",
    "recorded_ns", "pid_hint", "note",
)  # fmt: skip
"""The columns of a row, in order."""

RESOURCES: Final = ("cpus", "mems", "quota_us", "period_us", "shares")
"""The fields of a Container that are `linux.resources.cpu`."""

_TEXTS: Final = (
    "cgroups_path", "name", "pod_name", "pod_namespace", "pod_uid", "handler", "bundle",
)  # fmt: skip


def speaks(container: Container) -> bool:
    """Whether a record reports its container's CPUs; reporting none is a report."""
    reported = any(getattr(container, name) not in {None, ""} for name in RESOURCES)
    return reported or bool(container.cgroups_path)


def merged(old: Container | None, new: Container) -> Container:
    """Keep what an earlier record has and a later one lacks.

    A message whose bundle could not be read, and Kata's own state, lack names or paths. A record
    without any of the resources reports nothing about them.
    """
    if old is None:
        return new
    kept = {name: getattr(old, name) for name in _TEXTS if not getattr(new, name)}
    if not speaks(new):
        kept |= {name: getattr(old, name) for name in RESOURCES}
    return replace(new, **kept, pid_hint=new.pid_hint or old.pid_hint)


def row_of(container: Container) -> list[str | int | None]:
    """Return a container's row."""
    return [_plain(getattr(container, field)) for field in FIELDS]


def container_of(row: tuple[object, ...]) -> Container:
    """Return the container of a row; raises StateError when it makes no sense."""
    values = dict(zip(FIELDS, row, strict=True))
    try:
        cpus = None if values["cpus"] is None else CpuSet.parse(str(values["cpus"]))
        return Container(
            **{  # type: ignore[arg-type] # SQLite is dynamic; the schema gives the types
                **values,
                "cpus": cpus,
                "kind": ContainerKind(str(values["kind"])),
                "state": ContainerState(str(values["state"])),
            }
        )
    except (ParseError, ValueError) as error:
        raise StateError(f"registry row of container {values['id']}: {error}") from error


def _plain(value: object) -> str | int | None:
    if value is None or isinstance(value, int):
        return value
    return str(value)
