"""QEMU's command line: which sandbox, and what machine.

A part that cannot be read is a problem in the result and not an error: a hostile -smp must not hide
a sandbox. Any process can show any line, so a stranger's is read for its name only, and the rest
is bounded: at most MAX_WORK options, properties and vCPUs of -numa together, about 20 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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

MAX_WORK: Final = 8192
"""Options, properties and vCPUs of -numa that are read of one line. Kata's lines have 400."""

MAX_NAMES: Final = 64  # -name options; Kata gives one

_NAME_PREFIX: Final = "sandbox-"
_MAX_CID: Final = (1 << 32) - 1


@dataclass
class _Collected:
    """The arguments of interest, by option, while the line is walked."""

    machine: Properties = field(default_factory=dict)
    accels: list[str] = field(default_factory=list)
    smp: list[str] = field(default_factory=list)
    numa: list[str] = field(default_factory=list)
    memory: dict[str, CpuSet] = field(default_factory=dict)
    iothreads: list[str] = field(default_factory=list)
    guest_cid: int = 0
    kernel: str = ""
    monitor: bool = False
    problems: list[str] = field(default_factory=list)


def parse_qemu_name(argv: Sequence[str]) -> VmmCommand:
    """Return only which sandbox QEMU's arguments name, by `-name sandbox-<id>`.

    Raises ParseError for more than MAX_ARGUMENTS arguments or MAX_NAMES names.
    """
    values = [value for option, value in options(argv) if option == "name"]
    if len(values) > MAX_NAMES:
        raise ParseError(f"more than {MAX_NAMES} names", source="-name")
    found: Properties = {}
    for value in values:
        found |= properties(value, first="guest")
    name = last(found, "guest")
    sandbox_id = name.removeprefix(_NAME_PREFIX)
    is_kata = name != sandbox_id and is_id(sandbox_id)
    return VmmCommand(sandbox_id if is_kata else "")


def parse_qemu(argv: Sequence[str]) -> VmmCommand:
    """Read QEMU's arguments, argv[0] included; raises as parse_qemu_name does.

    `kvm` is whether KVM is the first accelerator.
    """
    named = parse_qemu_name(argv)
    found = _Collected()
    left = MAX_WORK
    for option, value in options(argv):
        left -= 1 + value.count(",")
        if left < 0:
            _complain(found.problems, f"more than {MAX_WORK} options and properties")
            break
        try:
            _collect(found, option, value)
        except ParseError as error:
            _complain(found.problems, str(error))
    return replace(
        named,
        guest=_guest(found, left),
        kvm=_first_accel(found) == "kvm",
        iothreads=tuple(dict.fromkeys(found.iothreads)),
        guest_cid=found.guest_cid,
        kernel=found.kernel,
        monitor=found.monitor,
        problems=tuple(found.problems),
    )


def _collect(found: _Collected, option: str, value: str) -> None:
    match option:
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
        case "qmp" | "qmp-pretty":
            found.monitor = True


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


def _guest(found: _Collected, work: int) -> GuestTopology:
    """Return the topology; `work` is how many vCPUs -numa may place, below 0 for a line cut off."""
    if work < 0:
        return GuestTopology()
    try:
        guest = parse_smp(found.smp, last(found.machine, "type"))
    except ParseError as error:
        _complain(found.problems, str(error))
        return GuestTopology()
    try:
        return parse_numa(guest, found.numa, found.memory, work=work)
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
