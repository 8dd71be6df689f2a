"""The state that a runtime passes to hooks, and the container's config.json.

Sources: OCI runtime-spec (state, hooks, config-linux), and what Kata's two runtimes really send:
`ociVersion` and `status` may be empty (src/runtime/pkg/katautils/hook.go), `id` may be another
container's. Which container it is: container_id.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kata_pin.errors import ParseError
from kata_pin.model.sandbox import ContainerState
from kata_pin.wire.annotations import annotations_of
from kata_pin.wire.json_text import Fields, load_fields

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


@dataclass(frozen=True, slots=True)
class OciState:
    """The state on a hook's stdin. `pid` is a hint: 0, the VMM, or a thread of the shim."""

    id: str
    bundle: str
    pid: int = 0
    status: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class CpuResources:
    """`linux.resources.cpu` of the OCI runtime spec; the lists are the original texts."""

    cpus: str = ""
    mems: str = ""
    quota_us: int | None = None
    period_us: int | None = None
    shares: int | None = None


@dataclass(frozen=True, slots=True)
class OciConfig:
    """The members of config.json that kata-pin uses."""

    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)
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
