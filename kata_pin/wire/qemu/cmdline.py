"""Command lines of VMMs and of the processes around them: which sandbox, and what machine.

A command line is what the process shows, not what it is: it names a candidate, and DESIGN D5 asks
for a witness beside it. So a part that cannot be read is a problem in the result and no error:
a hostile -smp must not hide a sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.sandbox import GuestTopology
from kata_pin.wire.ids import is_id
from kata_pin.wire.qemu.options import (
    MAX_ARGUMENTS,
    Properties,
    last,
    number,
    options,
    properties,
)
from kata_pin.wire.qemu.smp import parse_numa, parse_smp

MAX_IOTHREADS: Final = 1024
MAX_BACKENDS: Final = 1024

_NAME_PREFIX: Final = "sandbox-"
_SEPARATORS: Final = re.compile(r"[/,=:]")
_MAX_CID: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class QemuCommand:
    """What a QEMU command line says.

    `sandbox_id` is empty when -name is not Kata's `sandbox-<id>`. `guest.boot` is 0 when -smp could
    not be read. `kvm` is whether KVM is the first accelerator asked for. `qmp_paths` are the paths
    of unix QMP monitors: Kata 2 and 3 pass the main one as a descriptor, without a path. `problems`
    says what could not be read.
    """

    name: str = ""
    sandbox_id: str = ""
    debug_threads: bool = False
    guest: GuestTopology = field(default_factory=GuestTopology)
    kvm: bool = False
    iothreads: tuple[str, ...] = ()
    guest_cid: int = 0
    kernel: str = ""
    pidfile: str = ""
    qmp_paths: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass
class _Collected:
    """The arguments of interest, by option, while the line is walked."""

    name: Properties = field(default_factory=dict)
    machine: Properties = field(default_factory=dict)
    accels: list[str] = field(default_factory=list)
    smp: list[str] = field(default_factory=list)
    numa: list[str] = field(default_factory=list)
    memory: dict[str, CpuSet] = field(default_factory=dict)
    iothreads: list[str] = field(default_factory=list)
    qmp_paths: list[str] = field(default_factory=list)
    guest_cid: int = 0
    kernel: str = ""
    pidfile: str = ""
    problems: list[str] = field(default_factory=list)


def parse_qemu(argv: Sequence[str]) -> QemuCommand:
    """Read QEMU's arguments, argv[0] included; ParseError only for more than MAX_ARGUMENTS."""
    found = _Collected()
    for option, value in options(argv):
        try:
            _collect(found, option, value)
        except ParseError as error:
            _complain(found.problems, str(error))
    name = last(found.name, "guest")
    sandbox_id = name.removeprefix(_NAME_PREFIX)
    is_kata = name != sandbox_id and is_id(sandbox_id)
    return QemuCommand(
        name=name,
        sandbox_id=sandbox_id if is_kata else "",
        debug_threads=last(found.name, "debug-threads") == "on",
        guest=_guest(found),
        kvm=_first_accel(found) == "kvm",
        iothreads=tuple(dict.fromkeys(found.iothreads)),
        guest_cid=found.guest_cid,
        kernel=found.kernel,
        pidfile=found.pidfile,
        qmp_paths=tuple(dict.fromkeys(found.qmp_paths)),
        problems=tuple(found.problems),
    )


def _collect(found: _Collected, option: str, value: str) -> None:
    match option:
        case "name":
            found.name |= properties(value, first="guest")
        case "machine" | "M":
            found.machine |= properties(value, first="type")
        case "accel":
            found.accels.append(last(properties(value, first="accel"), "accel"))
        case "enable-kvm":
            found.accels.append("kvm")
        case "smp":
            found.smp.append(value)
        case "numa":
            found.numa.append(value)
        case "object":
            _collect_object(found, properties(value, first="qom-type"))
        case "device":
            _collect_device(found, properties(value, first="driver"))
        case "qmp" | "qmp-pretty":
            _collect_monitor(found, value)
        case "kernel":
            found.kernel = value
        case "pidfile":
            found.pidfile = value


def _collect_object(found: _Collected, values: Properties) -> None:
    kind, name = last(values, "qom-type"), last(values, "id")
    if kind == "iothread" and name:
        if len(found.iothreads) >= MAX_IOTHREADS:
            raise ParseError(f"more than {MAX_IOTHREADS} iothreads", source="-object")
        found.iothreads.append(name)
    elif kind.startswith("memory-backend-") and "host-nodes" in values:
        if len(found.memory) >= MAX_BACKENDS:
            raise ParseError(f"more than {MAX_BACKENDS} memory backends", source="-object")
        nodes = (CpuSet.parse(text, source="-object host-nodes") for text in values["host-nodes"])
        found.memory[name] = union(nodes)


def _collect_device(found: _Collected, values: Properties) -> None:
    if last(values, "driver").startswith("vhost-vsock") and "guest-cid" in values:
        cid = number(last(values, "guest-cid"), source="-device guest-cid", low=3, high=_MAX_CID)
        found.guest_cid = cid


def _collect_monitor(found: _Collected, value: str) -> None:
    """Take the path of `unix:/path,server` or `unix:path=/path,server=on`."""
    if value.startswith("unix:"):
        path = last(properties(value.removeprefix("unix:"), first="path"), "path")
        if path.startswith("/"):
            found.qmp_paths.append(path)


def _guest(found: _Collected) -> GuestTopology:
    try:
        guest = parse_smp(found.smp, last(found.machine, "type"))
    except ParseError as error:
        _complain(found.problems, str(error))
        return GuestTopology()
    try:
        return parse_numa(guest, found.numa, found.memory)
    except ParseError as error:
        _complain(found.problems, str(error))
        return guest


def _first_accel(found: _Collected) -> str:
    """Return the accelerator tried first: `-accel a -accel b`, or `-machine accel=a:b`."""
    names = found.accels or last(found.machine, "accel").split(":")
    return names[0]


def _complain(problems: list[str], text: str) -> None:
    if len(problems) < 8:  # enough to see what is wrong; a hostile line has thousands
        problems.append(text)


@dataclass(frozen=True, slots=True)
class OtherCommand:
    """What cloud-hypervisor's, firecracker's or the shim's command line says.

    `sandbox_id` may be cut: Kata gives firecracker the first 32 characters. Empty: not named.
    """

    sandbox_id: str = ""
    api_socket: str = ""


def parse_cloud_hypervisor(argv: Sequence[str]) -> OtherCommand:
    """Read `--api-socket /run/vc/vm/<id>/clh-api.sock` (Go) or below /run/kata/<id>/root (rs)."""
    value = _argument(argv, ("--api-socket",))
    path = last(_tolerant_properties(value, first="path"), "path")
    return OtherCommand(_id_of_directory(path), path)


def parse_firecracker(argv: Sequence[str]) -> OtherCommand:
    """Read `--id <id>` and `--api-sock <path>`."""
    named = _argument(argv, ("--id",))
    path = _argument(argv, ("--api-sock",))
    return OtherCommand(named if is_id(named) else _id_of_directory(path), path)


def parse_shim(argv: Sequence[str]) -> OtherCommand:
    """Read `-id <sandbox>` of containerd-shim-kata-v2 (Go's flag package: one dash or two)."""
    named = _argument(argv, ("-id", "--id"))
    return OtherCommand(named if is_id(named) else "")


def names_sandbox(argv: Iterable[str], sandbox_id: str) -> bool:
    """Return whether an argument has `sandbox_id` as a whole element of a path or value.

    For virtiofsd and nydusd, whose arguments are paths below the sandbox's directories.
    """
    if not sandbox_id:
        return False
    return any(sandbox_id in arg and sandbox_id in _SEPARATORS.split(arg) for arg in argv)


def _argument(argv: Sequence[str], names: tuple[str, ...]) -> str:
    """Return what follows the first of `names`, or stands behind its `=`; empty when absent."""
    if len(argv) > MAX_ARGUMENTS:
        raise ParseError(f"more than {MAX_ARGUMENTS} arguments", source="cmdline")
    for position, arg in enumerate(argv):
        name, equals, value = arg.partition("=")
        if name in names:
            if equals:
                return value
            return argv[position + 1] if position + 1 < len(argv) else ""
    return ""


def _tolerant_properties(value: str, first: str) -> Properties:
    try:
        return properties(value, first=first)
    except ParseError:
        return {}


def _id_of_directory(path: str) -> str:
    """Return the sandbox whose directory holds a socket; runtime-rs puts it one `root` deeper."""
    parts = path.split("/")[:-1]
    if parts and parts[-1] == "root":
        parts.pop()
    return parts[-1] if parts and is_id(parts[-1]) else ""
