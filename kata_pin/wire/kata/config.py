"""Kata's configuration.toml: the settings that matter to kata-pin.

They decide which VMM binaries are accepted (D5), whether Kata pins too (D13), whether an extra QMP
monitor may exist (D6), and how a VM is sized. Finding the files: sources/kata_config.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kata_pin.wire.json_text import Fields
from kata_pin.wire.toml_text import load

MAX_PATHS: Final = 64
MAX_TABLES: Final = 16

_SOURCE: Final = "configuration.toml"
_MAX_VCPUS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class KataConfig:
    """One Kata configuration.

    `hypervisor` is the table's name (`qemu`, `clh`...). `valid_paths` may have glob patterns.
    `default_vcpus` may be a fraction since Kata 3.4; `default_maxvcpus` 0 means all CPUs of the
    host. `extra_monitor` has no effect without `debug`.
    """

    hypervisor: str = ""
    path: str = ""
    valid_paths: tuple[str, ...] = ()
    debug: bool = False
    extra_monitor: str = ""
    iothreads: bool = False
    default_vcpus: float = 0
    default_maxvcpus: int = 0
    vcpu_pinning: bool = False
    sandbox_cgroup_only: bool = False
    static_sizing: bool = False

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
        default_vcpus=_vcpus(table),
        default_maxvcpus=table.number("default_maxvcpus", 0, _MAX_VCPUS) or 0,
        vcpu_pinning=runtime.flag("enable_vcpus_pinning"),
        sandbox_cgroup_only=runtime.flag("sandbox_cgroup_only"),
        static_sizing=runtime.flag("static_sandbox_resource_mgmt"),
    )


def _paths(table: Fields, key: str) -> tuple[str, ...]:
    paths = table.items(key, limit=MAX_PATHS)
    for path in paths:
        if not isinstance(path, str) or len(path) > 4096:
            raise table.fail(key, "not a list of paths")
    return tuple(str(path) for path in paths)


def _vcpus(table: Fields) -> float:
    value = table.get("default_vcpus")
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise table.fail("default_vcpus", "not a number")
    if not -_MAX_VCPUS <= value <= _MAX_VCPUS:  # negative: all CPUs of the host; also refuses nan
        raise table.fail("default_vcpus", f"not within {-_MAX_VCPUS} to {_MAX_VCPUS}")
    return value
