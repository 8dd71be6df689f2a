"""Roles from thread names.

A weak source: QEMU names threads only with debug-threads=on (QEMU 11: always), names belong to the
process, and the kernel cuts them at 15 characters; QEMU leaves a thread unnamed whose name would be
longer, such as Kata's iothreads. Source: util/qemu-thread-posix.c.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kata_pin.model.sandbox import Vmm, VmmKind
from kata_pin.model.thread import ThreadRole

_VCPU: Final = {
    VmmKind.QEMU: re.compile(r"CPU ([0-9]{1,4})/(?:KVM|TCG)\Z"),
    VmmKind.CLOUD_HYPERVISOR: re.compile(r"vcpu([0-9]{1,4})\Z"),
    VmmKind.FIRECRACKER: re.compile(r"fc_vcpu ?([0-9]{1,4})\Z"),
    VmmKind.DRAGONBALL: re.compile(r"db_vcpu([0-9]{1,4})\Z"),
}
_MONITOR: Final = "mon_iothread"
_COMM: Final = 15


@dataclass(frozen=True)
class NamedRole:
    """What a name says: a vCPU with its index, an iothread with its id, or an emulator thread."""

    role: ThreadRole
    vcpu: int | None = None
    iothread: str = ""


def role_of(vmm: Vmm, comm: str) -> NamedRole | None:
    """Return the role that a thread's name says, None when it says nothing."""
    match = _VCPU[vmm.kind].match(comm)
    if match is not None:
        return NamedRole(ThreadRole.VCPU, vcpu=int(match[1]))
    if vmm.kind is VmmKind.QEMU and comm.startswith("IO "):
        return _iothread(vmm, comm[3:])
    if vmm.kind is VmmKind.DRAGONBALL and comm.startswith("blk_iothread"):
        return NamedRole(ThreadRole.IOTHREAD, iothread=comm)
    return None


def _iothread(vmm: Vmm, name: str) -> NamedRole | None:
    """Return QEMU's iothread of that name; its monitor thread is an iothread in name only."""
    if name == _MONITOR[: _COMM - 3]:
        return NamedRole(ThreadRole.EMULATOR)
    ids = [one for one in vmm.iothreads if one == name or one[: _COMM - 3] == name]
    return NamedRole(ThreadRole.IOTHREAD, iothread=ids[0] if len(ids) == 1 else "")
