"""What kata-pin knows of each VMM: one row per program. Nothing else branches on which VMM it is.

Another package adds a VMM by an entry point of the group `kata_pin.vmms` that loads a VmmKind, or
what has the same attributes. It is loaded only where an executable is configured (in `hypervisors`,
or in Kata's configuration) that no row here fits.

vhost workers need no column: the kernel names them after the thread that called
VHOST_SET_OWNER. That is QEMU's main thread but a vCPU thread of Dragonball's, so any thread of the
VMM's process is accepted (roles.py, find.py).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, NamedTuple

from msgspec import Struct

from kata_pin.base.errors import reason_of
from kata_pin.base.values import ThreadRole
from kata_pin.peers.qemu import parse_qemu, parse_qemu_name
from kata_pin.peers.vmm_cmdline import (
    VmmCommand,
    parse_cloud_hypervisor,
    parse_firecracker,
    parse_openvmm,
    parse_shim,
)

log = logging.getLogger(__name__)

GROUP: Final = "kata_pin.vmms"  # the group of entry points; the entry's object is a VmmKind
MAX_COMM: Final = 15  # the kernel cuts thread names here


class NamedRole(NamedTuple):
    """What a thread's name shows: a vCPU and its index, an iothread and its id, or another role."""

    role: ThreadRole
    vcpu: int | None = None
    iothread: str = ""


class KvmIds(Enum):
    """What KVM's vCPU ids are on x86; elsewhere they are indexes."""

    INDEX = auto()
    SMP = auto()
    """APIC ids of the topology on the command line (`VmmCommand.guest`)."""
    OTHER = auto()
    """APIC ids of a topology that the command line does not show: no index follows from them."""


class ThreadName(NamedTuple):
    """A scheme of whole thread names: group 1 is a vCPU's index or an iothread's id."""

    pattern: re.Pattern[str]
    role: ThreadRole


class VmmKind(Struct, frozen=True):
    """One VMM program, as everything outside this module sees it.

    `executables` are patterns (fnmatch) of its executable's file name. `read` returns what the
    command line contains; ParseError for an absurd one. `name_reader` is there where that costs
    more than finding the name. The first of `threads` that matches a name counts. `in_shim`: it is
    a library inside Kata's shim and not a process of its own. `jailed`: Kata may run it in a jail
    (claims.py). `kvm_ids` is for x86. `qmp`: it can be asked over QMP. `in_order`: it creates its
    threads in the order that roles.py knows.
    """

    name: str
    executables: Sequence[str]
    read: Callable[[Sequence[str]], VmmCommand]
    threads: Sequence[ThreadName]
    in_shim: bool = False
    jailed: bool = False
    kvm_ids: KvmIds = KvmIds.INDEX
    qmp: bool = False
    in_order: bool = False
    name_reader: Callable[[Sequence[str]], VmmCommand] | None = None

    def read_name(self, argv: Sequence[str]) -> VmmCommand:
        """Return only which sandbox it names: all that is read of a process not yet accepted."""
        return (self.name_reader or self.read)(argv)

    def role_of(self, comm: str, iothreads: Sequence[str]) -> NamedRole | None:
        """Return what a thread's name shows; `iothreads` are the ids on the command line."""
        for pattern, role in self.threads:
            match = pattern.fullmatch(comm)
            if match is None:
                continue
            if role is ThreadRole.VCPU:
                return NamedRole(role, vcpu=int(match[1]))
            if role is ThreadRole.IOTHREAD:
                cut = MAX_COMM - match.start(1)
                return NamedRole(role, iothread=_iothread(match[1], iothreads, cut))
            return NamedRole(role)
        return None


def _iothread(name: str, declared: Sequence[str], cut: int) -> str:
    """Return the one declared id that shows as `name`, `name` itself where none is declared."""
    ids = [one for one in declared if one == name or one[:cut] == name]
    return ids[0] if len(ids) == 1 else "" if declared else name


def _named(pattern: str, role: ThreadRole) -> ThreadName:
    return ThreadName(re.compile(pattern), role)


# Executables and thread names as seen with Kata 3.21 to 3.32 and with each VMM run by itself. QEMU
# names its threads only with debug-threads=on before version 11 (util/qemu-thread-posix.c); its
# monitor thread is an iothread in name only.
QEMU: Final = VmmKind(
    "qemu",
    ("qemu-system-*", "qemu-kvm", "qemu-lite-system-*"),
    parse_qemu,
    (
        _named("CPU ([0-9]{1,4})/(?:KVM|TCG)", ThreadRole.VCPU),
        _named("IO mon_iothread", ThreadRole.EMULATOR),
        _named("IO (.+)", ThreadRole.IOTHREAD),
    ),
    kvm_ids=KvmIds.SMP,
    qmp=True,
    in_order=True,
    name_reader=parse_qemu_name,
)
CLOUD_HYPERVISOR: Final = VmmKind(
    "cloud-hypervisor",
    ("cloud-hypervisor*",),
    parse_cloud_hypervisor,
    (
        _named("vcpu([0-9]{1,4})", ThreadRole.VCPU),
        _named("((?:_disk|clh_drive_)[0-9]+_q[0-9]*)", ThreadRole.IOTHREAD),
    ),
    kvm_ids=KvmIds.OTHER,
)
FIRECRACKER: Final = VmmKind(
    "firecracker",
    ("firecracker*",),
    parse_firecracker,
    (_named("fc_vcpu ?([0-9]{1,4})", ThreadRole.VCPU),),
    jailed=True,
)
DRAGONBALL: Final = VmmKind(
    "dragonball",
    ("containerd-shim-kata*",),
    parse_shim,
    (
        _named("db_vcpu([0-9]{1,4})", ThreadRole.VCPU),
        _named("(blk_iothread.*)", ThreadRole.IOTHREAD),
    ),
    in_shim=True,
)
# From the sources of Kata 4.1 and OpenVMM, not from a running one; it has no vCPU hotplug.
OPENVMM: Final = VmmKind(
    "openvmm",
    ("openvmm",),
    parse_openvmm,
    (_named("vp-([0-9]{1,4})", ThreadRole.VCPU),),
    kvm_ids=KvmIds.OTHER,
)

BUILTIN: Final[tuple[VmmKind, ...]] = (QEMU, CLOUD_HYPERVISOR, FIRECRACKER, DRAGONBALL, OPENVMM)

OTHERWISE: Final = QEMU  # what an allowed executable is that no row fits: a QEMU under another name


def kinds_for(executables: Iterable[str]) -> tuple[VmmKind, ...]:
    """Return the rows to recognise these executables by: third ones only where ours do not do."""
    if all(_fitting(path, BUILTIN) for path in executables):
        return BUILTIN
    return (*BUILTIN, *_third().values())


def kind_of(path: str, kinds: Iterable[VmmKind]) -> VmmKind:
    """Return which of the kinds an allowed executable is."""
    return _fitting(path, kinds) or OTHERWISE


def vcpu_names(kinds: Iterable[VmmKind]) -> tuple[str, ...]:
    """Return what names their vCPU threads have, as regular expressions for whole names."""
    schemes = (scheme for kind in kinds for scheme in kind.threads)
    return tuple(one.pattern.pattern for one in schemes if one.role is ThreadRole.VCPU)


def kind_named(name: str) -> VmmKind:
    """Return the row of a VMM that was accepted (`Vmm.kind`)."""
    known = next((kind for kind in BUILTIN if kind.name == name), None)
    return known or _third().get(name, OTHERWISE)


def _fitting(path: str, kinds: Iterable[VmmKind]) -> VmmKind | None:
    name = os.path.basename(path)
    return next((k for k in kinds if any(fnmatchcase(name, one) for one in k.executables)), None)


@lru_cache(maxsize=1)
def _third() -> Mapping[str, VmmKind]:
    """Return the rows of other packages by name, without those that cannot be loaded."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - 20 ms that few need

    found: dict[str, VmmKind] = {}
    for entry in entry_points(group=GROUP):
        try:
            kind: VmmKind = entry.load()
            if any(kind.name == own.name for own in BUILTIN):
                raise ValueError(f"kata-pin has a VMM {kind.name} itself")
            found[kind.name] = kind
        except Exception as error:  # noqa: BLE001 - code of others; it must not end the daemon
            log.error(
                "cannot load VMM kind %s from %s: %s", entry.name, entry.value, reason_of(error)
            )
    return found
