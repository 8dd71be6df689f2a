"""The files of `kata-pin kata-class`: a handler of containerd for pods of N exclusive CPUs.

Kata reads drop-ins beside the configuration file that a handler names, links resolved, for every
handler that names it. So the class has a folder of its own, with a copy of the base handler's file
and drop-ins, and one drop-in more; Kata's own files stay as they are.
"""

from __future__ import annotations

import os
from typing import Final

from msgspec import Struct

from kata_pin.base.errors import KataPinError, reason_of
from kata_pin.base.values import KataRuntime
from kata_pin.cli.node import containerd
from kata_pin.cli.node.files import CLASS_DROP_IN, CLASSES, NodeFile
from kata_pin.peers import containerd as wire
from kata_pin.peers.kata import KataConfig, drop_ins, read_kata_config, text_of
from kata_pin.placement.vm_size import DROP_IN, class_drop_in
from kata_pin.vmm.kinds import QEMU

INFIX: Final = "-cpus-"
"""Between the base handler's name and the number of CPUs in the name of a class."""

DEFAULTS: Final = (
    "/etc/kata-containers/runtime-rs/configuration.toml",
    "/usr/share/defaults/kata-containers/runtime-rs/configuration.toml",
    "/opt/kata/share/defaults/kata-containers/runtime-rs/configuration.toml",
)
"""Where runtime-rs looks if a handler names no file (kata-types, config/default.rs)."""

_RUNTIME_CLASS: Final = """\
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata:
  name: {name}
handler: {name}
overhead:
  podFixed:  # as Kata's own class for QEMU has it; yours may differ
    cpu: 250m
    memory: 320Mi
scheduling:
  nodeSelector:  # kubectl label node NODE kata-pin.io/{name}=true
    kata-pin.io/{name}: "true"
"""


class KataClass(Struct, frozen=True):
    """A class: its name, its base's configuration file, the files to write, and its RuntimeClass.

    `table` is to be added to containerd's configuration by hand where a drop-in would change other
    settings too; empty where a drop-in is among the files.
    """

    name: str
    base_config: str
    files: tuple[NodeFile, ...]
    table: str

    @property
    def runtime_class(self) -> str:
        """The object for the cluster, as YAML."""
        return _RUNTIME_CLASS.format(name=self.name)


def plan(cpus: int, base: str, run: containerd.Run) -> KataClass:
    """Return the class of a handler, empty for Kata's only one; raises KataPinError."""
    config = containerd.dump(run, containerd.CONFIG)
    handler = _base(config, base)
    source = _source(handler)
    name = f"{handler.name}{INFIX}{cpus}"
    folder = f"{CLASSES}{name}"
    path = f"{folder}/configuration.toml"
    files = [NodeFile(path, _content(source))]
    files += [
        NodeFile(f"{folder}/config.d/{os.path.basename(drop_in)}", _content(drop_in))
        for drop_in in drop_ins(source)
    ]
    files.append(NodeFile(f"{folder}/{DROP_IN}", class_drop_in(cpus).encode()))
    plugins = wire.with_handler(config, handler.name, name, path)
    version = containerd.own_version(config)
    table = wire.handler_drop_in(config, version, plugins, name)
    place = f"{containerd.imported_folder() or containerd.FOLDER}/"
    drop_in = NodeFile(f"{place}{CLASS_DROP_IN}{name}.toml", table.encode())
    known = config.handlers.get(name)
    if known is not None and known.config_path == path and not os.path.exists(drop_in.path):
        return KataClass(name, source, tuple(files), "")  # its table was added by hand
    if known is None and not containerd.merges(plugins, table, version, run):
        return KataClass(name, source, tuple(files), table)
    return KataClass(name, source, (*files, drop_in), "")


def _base(config: wire.RuntimeConfig, name: str) -> wire.Handler:
    kata = {
        handler.name: handler
        for handler in config.handlers.values()
        if handler.is_kata and not handler.config_path.startswith(CLASSES)
    }
    if name in kata:
        return kata[name]
    if not name and len(kata) == 1:
        return next(iter(kata.values()))
    known = f"containerd's handlers of Kata: {', '.join(kata) or 'none'}"
    if name:
        raise KataPinError(f"{name} is not a handler of Kata", hint=known)
    raise KataPinError("cannot choose a handler of Kata: name one with --handler", hint=known)


def _source(handler: wire.Handler) -> str:
    """Return the handler's configuration file; raises KataPinError where a class cannot help."""
    paths = (handler.config_path,) if handler.config_path else DEFAULTS
    found = [os.path.realpath(path) for path in paths if os.path.exists(path)]
    if not found:
        raise KataPinError(f"handler {handler.name}: no configuration file at {' or '.join(paths)}")
    read = read_kata_config(found[0])
    if read.problem or not read.configs:
        raise KataPinError(f"{found[0]}: {read.problem or 'no hypervisor in it'}")
    why = _unfit(read.configs[0])
    if why:
        raise KataPinError(
            f"a class by size does not help handler {handler.name}: {why} ({found[0]})",
            hint="docs/kata.md says how Kata sizes VMs",
        )
    return found[0]


def _unfit(table: KataConfig) -> str:
    if table.runtime is not KataRuntime.RUST:
        return "Kata's Go runtime has no overhead_vcpus"
    if table.hypervisor != QEMU.name:
        return f"classes are tested with QEMU only, not with {table.hypervisor}"
    if table.overhead_vcpus is None:
        return "Kata has no overhead_vcpus before 4.0"
    if not table.static_sizing:
        return "static_sandbox_resource_mgmt is false, and overhead_vcpus counts only with it"
    return ""


def _content(path: str) -> bytes:
    try:
        return text_of(path).encode()
    except OSError as error:
        raise KataPinError(f"cannot read {path}: {reason_of(error)}") from error
