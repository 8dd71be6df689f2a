"""QEMU's command line: which sandbox, and what machine.

A part that cannot be read is a problem in the result and not an error: a hostile -smp must not hide
a sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.sandbox import GuestTopology
from kata_pin.wire.ids import is_id
from kata_pin.wire.qemu.options import Properties, last, number, options, properties
from kata_pin.wire.qemu.smp import parse_numa, parse_smp
from kata_pin.wire.vmm_cmdline import VmmCommand

MAX_IOTHREADS: Final = 1024
MAX_BACKENDS: Final = 1024

_NAME_PREFIX: Final = "sandbox-"
_MAX_CID: Final = (1 << 32) - 1


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
    guest_cid: int = 0
    kernel: str = ""
    problems: list[str] = field(default_factory=list)


def parse_qemu(argv: Sequence[str]) -> VmmCommand:
    """Read QEMU's arguments, argv[0] included; ParseError only for more than MAX_ARGUMENTS.

    The sandbox is named by `-name sandbox-<id>`; `kvm` is whether KVM is the first accelerator.
    """
    found = _Collected()
    for option, value in options(argv):
        try:
            _collect(found, option, value)
        except ParseError as error:
            _complain(found.problems, str(error))
    name = last(found.name, "guest")
    sandbox_id = name.removeprefix(_NAME_PREFIX)
    is_kata = name != sandbox_id and is_id(sandbox_id)
    return VmmCommand(
        sandbox_id=sandbox_id if is_kata else "",
        guest=_guest(found),
        kvm=_first_accel(found) == "kvm",
        iothreads=tuple(dict.fromkeys(found.iothreads)),
        guest_cid=found.guest_cid,
        kernel=found.kernel,
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
        case "kernel":
            found.kernel = value


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
