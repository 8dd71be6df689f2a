"""containerd's configuration and base runtime specs, as `install --containerd` needs them.

Facts: containerd's own document of CRI's configuration (base_runtime_spec), and its sources. Which
files containerd unites, and how, is not rebuilt here: `containerd config dump` says it. The files
are root's own; they are bounded all the same. Finding and writing them: cli/node/containerd.py.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from kata_pin.base import json_text
from kata_pin.base.errors import ParseError
from kata_pin.base.toml_text import load

RUNTIME_PLUGINS: Final = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri")
"""Who has the table of runtime handlers: containerd 2, containerd 1."""

BASE_SPEC: Final = "base_runtime_spec"

_KATA_TYPE: Final = re.compile(r"io\.containerd\.kata(-[\w-]+)?\.v2")
_KATA_SHIM: Final = "containerd-shim-kata"

_HANDLER: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?")
"""Names that Kubernetes takes for handlers, and underscores; a file is named by it."""

MAX_SPEC: Final = 1 << 20
"""Largest base runtime spec, in bytes; `ctr oci spec` prints about 5 KiB."""

Spec = dict[str, Any]


class Handler(Struct, frozen=True):
    """One runtime handler; `base_spec` is the path of its base runtime spec, or empty.

    `config_path` is the configuration file that it gives its shim, empty for the shim's default.
    """

    name: str
    is_kata: bool
    base_spec: str
    config_path: str = ""


class RuntimeConfig(Struct, frozen=True):
    """What containerd makes of its configuration; `plugin` has the handlers."""

    version: int
    plugin: str
    handlers: Mapping[str, Handler]
    plugins: Mapping[str, Any]

    def with_base_specs(self, specs: Mapping[str, str]) -> Mapping[str, Any]:
        """Return `plugins` with other base runtime specs, given by handler."""
        changed = copy.deepcopy(dict(self.plugins))
        for name, path in specs.items():
            changed[self.plugin]["containerd"]["runtimes"][name][BASE_SPEC] = path
        return changed


def parse_dump(text: str) -> RuntimeConfig:
    """Return the configuration that `containerd config dump` printed; raises ParseError."""
    source = "containerd config dump"
    document = load(text, source=source)
    version, plugins = document.get("version"), document.get("plugins")
    if not isinstance(version, int) or not isinstance(plugins, dict):
        raise ParseError("no version or no plugins", source=source)
    for plugin in RUNTIME_PLUGINS:
        runtimes = _runtimes(plugins, plugin)
        if runtimes is not None:
            found = {
                name: _handler(name, table)
                for name, table in runtimes.items()
                if isinstance(table, dict) and _HANDLER.fullmatch(name)
            }
            return RuntimeConfig(version, plugin, found, plugins)
    raise ParseError("no CRI plugin with runtime handlers", source=source)


def _runtimes(plugins: object, plugin: str) -> dict[str, object] | None:
    for key in (plugin, "containerd", "runtimes"):
        plugins = plugins.get(key) if isinstance(plugins, dict) else None
    return plugins if isinstance(plugins, dict) else None


def handler_plugins(text: str) -> Mapping[str, str]:
    """Return the handlers that a configuration file has a table of, each with its plugin's name.

    Raises ParseError.
    """
    plugins = load(text, source="containerd's configuration").get("plugins")
    return {
        name: plugin
        for plugin in ("cri", *RUNTIME_PLUGINS)
        for name in _runtimes(plugins, plugin) or ()
    }


def _handler(name: str, table: Mapping[str, object]) -> Handler:
    kind, path, base = (table.get(key, "") for key in ("runtime_type", "runtime_path", BASE_SPEC))
    shim = str(path).rpartition("/")[2]
    is_kata = bool(_KATA_TYPE.fullmatch(str(kind))) or shim.startswith(_KATA_SHIM)
    options = table.get("options")
    given = options.get("ConfigPath") if isinstance(options, dict) else ""
    return Handler(name, is_kata, *(one if isinstance(one, str) else "" for one in (base, given)))


def parse_imports(text: str) -> tuple[str, ...]:
    """Return the paths and patterns that a configuration file imports; raises ParseError."""
    imports = load(text, source="containerd's configuration").get("imports")
    return tuple(filter(_is_text, imports)) if isinstance(imports, list) else ()


def base_specs(text: str) -> frozenset[str]:
    """Return the base runtime specs that a configuration file names; raises ParseError.

    An empty one names none: `containerd config default` writes it for every handler.
    """
    return frozenset(_named(load(text, source="containerd's configuration")))


def _named(table: Mapping[str, object]) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _named(value)
        elif key == BASE_SPEC and isinstance(value, str) and value:
            yield value


def parse_version(text: str, source: str) -> int:
    """Return the version that a configuration file says; without one it is 1. Raises ParseError."""
    version = load(text, source=source).get("version", 1)
    if not isinstance(version, int):
        raise ParseError("a version that is no number", source=source)
    return version


def drop_in(config: RuntimeConfig, version: int, specs: Mapping[str, str]) -> str:
    """Return a file of a version that gives handlers base runtime specs, and says nothing else."""
    plugin = plugin_of(config, version)
    lines = [
        "# Written by kata-pin install: Kata's runtime handlers get the hooks of kata-pin.",
        f"version = {version}",
    ]
    for name, path in specs.items():
        lines += ["", table_of(plugin, name), f'  {BASE_SPEC} = "{path}"']
    return "\n".join(lines) + "\n"


def with_handler(config: RuntimeConfig, base: str, name: str, config_path: str) -> Spec:
    """Return `plugins` with one more handler: as `base`, with another configuration of Kata."""
    changed = copy.deepcopy(dict(config.plugins))
    runtimes = changed[config.plugin]["containerd"]["runtimes"]
    options = {**(runtimes[base].get("options") or {}), "ConfigPath": config_path}
    runtimes[name] = {**copy.deepcopy(runtimes[base]), "options": options}
    return changed


def handler_drop_in(config: RuntimeConfig, version: int, plugins: Spec, name: str) -> str:
    """Return a file of a version with the table of one handler of `plugins`, and nothing else."""
    table = plugins[config.plugin]["containerd"]["runtimes"][name]
    header = table_of(plugin_of(config, version), name)
    lines = ["# Written by kata-pin kata-class.", f"version = {version}", *_table(header, table)]
    return "\n".join(lines) + "\n"


def _table(header: str, table: Spec) -> Iterator[str]:
    yield f"\n{header}"
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"  {json.dumps(key)} = {json.dumps(value)}"  # TOML for these types
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _table(f"{header[:-1]}.{json.dumps(key)}]", value)


def table_of(plugin: str, handler: str) -> str:
    """Return the header of a handler's table."""
    return f'[plugins."{plugin}".containerd.runtimes."{handler}"]'


def plugin_of(config: RuntimeConfig, version: int) -> str:
    """Return how a file of a version names the plugin with the handlers (containerd's migrations).

    containerd migrates older files as it reads them; what it dumps has the newest names.
    """
    return config.plugin if version > 2 else RUNTIME_PLUGINS[1] if version == 2 else "cri"


def parse_spec(data: bytes, source: str) -> Spec:
    """Return a base runtime spec; raises ParseError, also for hooks that are none."""
    spec = json_text.load(data, source=source, limit=MAX_SPEC)
    fields = json_text.Fields(spec, source=source)
    for part in ("process", "linux"):
        fields.fields(part)
    hooks = fields.fields("hooks")
    for phase in hooks.names:
        hooks.objects(phase)
    assert isinstance(spec, dict), "checked by Fields"
    return spec


def without_defaults(spec: Spec) -> Spec:
    """Return `ctr oci spec` without what containerd itself removes where no base spec is set.

    Limits of 1024 open files for every container are among it (WithoutDefaultSecuritySettings).
    """
    process, linux = dict(spec.get("process") or {}), dict(spec.get("linux") or {})
    for key in ("rlimits", "apparmorProfile"):
        process.pop(key, None)
    linux.pop("seccomp", None)
    return {**spec, "process": process, "linux": linux}


def with_hooks(spec: Spec, hooks: Mapping[str, list[Spec]], program: str) -> Spec:
    """Return a spec with `hooks` behind its own; earlier ones that run `program` are replaced."""
    kept = {
        phase: [one for one in entries or [] if one.get("path") != program]
        for phase, entries in (spec.get("hooks") or {}).items()
    }
    merged = {phase: [*kept.get(phase, []), *hooks.get(phase, [])] for phase in {**kept, **hooks}}
    return {**spec, "hooks": {phase: entries for phase, entries in merged.items() if entries}}


def runs_program(data: bytes, program: str) -> bool:
    """Whether a base runtime spec has a hook that runs `program`; False for none at all."""
    try:
        hooks = parse_spec(data, "a base runtime spec").get("hooks") or {}
    except ParseError:  # whoever reads it more generously may run it
        return program.encode() in data
    return any(one.get("path") == program for entries in hooks.values() for one in entries or [])


def encode_spec(spec: Spec) -> bytes:
    """Return a base runtime spec as a file."""
    return (json.dumps(spec, indent=2) + "\n").encode()


def _is_text(value: object) -> bool:
    return isinstance(value, str)
