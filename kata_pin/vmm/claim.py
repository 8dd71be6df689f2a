"""What a process says it is, and the checks on it that its kind of VMM needs.

Command lines are the process's own to write; everything else here is the kernel's word. Nothing is
kept (D5).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kata_pin.errors import KataPinError, TaskGone
from kata_pin.model.sandbox import GuestTopology, Vmm, VmmKind
from kata_pin.vmm.host_access import HostAccess, HostPaths, ProcessFacts
from kata_pin.wire.proc import status_field
from kata_pin.wire.qemu.cmdline import (
    parse_cloud_hypervisor,
    parse_firecracker,
    parse_qemu,
    parse_shim,
)

FIRECRACKER_ID: Final = 32
"""Kata gives firecracker the first 32 characters of a sandbox id (virtcontainers/fc.go)."""

_STATUS_BYTES: Final = 8192
_DRAGONBALL_VCPU: Final = re.compile(r"db_vcpu[0-9]{1,4}\Z")


class Refused(KataPinError):  # noqa: N818 - a verdict with its reason, collected by find.py
    """A candidate is not the sandbox's VMM."""


@dataclass(frozen=True)
class Named:
    """What a command line claims."""

    sandbox_id: str
    guest: GuestTopology = field(default_factory=GuestTopology)
    kvm: bool = True
    iothreads: tuple[str, ...] = ()
    debug_threads: bool = False
    guest_cid: int = 0
    kernel: str = ""
    cut: bool = False

    def is_of(self, sandbox_id: str) -> bool:
        """Whether it names this sandbox; firecracker's name is cut."""
        wanted = sandbox_id[:FIRECRACKER_ID] if self.cut else sandbox_id
        return self.sandbox_id in {wanted, sandbox_id}

    def vmm(
        self,
        kind: VmmKind,
        process: ProcessFacts,
        exe: str,
        *,
        deleted: bool,
        witness: str,
        orphan: bool,
    ) -> Vmm:
        """Return the accepted VMM."""
        return Vmm(
            kind=kind,
            process=process.key,
            parent=process.ppid,
            exe=exe,
            witness=witness,
            guest=self.guest,
            kvm=self.kvm,
            iothreads=self.iothreads,
            debug_threads=self.debug_threads,
            guest_cid=self.guest_cid,
            kernel=self.kernel,
            orphan=orphan,
            exe_deleted=deleted,
        )


def named(host: HostAccess, pid: int, kind: VmmKind) -> Named:
    """Return what the process claims; raises TaskGone, and ParseError for an absurd line."""
    argv = host.cmdline(pid)
    match kind:
        case VmmKind.QEMU:
            return _qemu(argv)
        case VmmKind.CLOUD_HYPERVISOR:
            return Named(parse_cloud_hypervisor(argv).sandbox_id)
        case VmmKind.FIRECRACKER:
            return Named(parse_firecracker(argv).sandbox_id, cut=True)
        case VmmKind.DRAGONBALL:
            return Named(parse_shim(argv).sandbox_id)


def _qemu(argv: Sequence[str]) -> Named:
    said = parse_qemu(argv)
    return Named(
        said.sandbox_id,
        guest=said.guest,
        kvm=said.kvm,
        iothreads=said.iothreads,
        debug_threads=said.debug_threads,
        guest_cid=said.guest_cid,
        kernel=said.kernel,
    )


def thread_group(root: HostPaths, tid: int) -> int:
    """Return the process that a tid belongs to, the tid itself when that cannot be read.

    Hooks of Dragonball, and poststart hooks of the Go runtime, are told a thread of the shim.
    """
    text = status_field(_status(root, tid), "Tgid")
    return int(text) if text is not None and text.isdecimal() else tid


def check_namespace(root: HostPaths, pid: int) -> None:
    """Refuse a process of a nested pid namespace: shims start VMMs in their own, the host's.

    NSpid has one number for each level (proc_pid_status(5)).
    """
    levels = status_field(_status(root, pid), "NSpid")
    if levels is not None and len(levels.split()) > 1:
        raise Refused("it runs in a pid namespace of its own")


def check_dragonball(root: HostPaths, pid: int) -> None:
    """Refuse a shim that runs no VM itself: Go's shims have the same command line."""
    try:
        names = [_comm(root, pid, tid) for tid in os.listdir(root.proc(pid, "task"))]
    except OSError as error:
        raise TaskGone("list threads of", f"process {pid}", error.errno or 0) from error
    if not any(_DRAGONBALL_VCPU.match(name) for name in names):
        raise Refused("it is a shim that runs no VM itself")


def owner(root: HostPaths, pid: int) -> int | None:
    """Return the effective uid of a process, None when it is gone."""
    words = (status_field(_status(root, pid), "Uid") or "").split()
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else None


def _status(root: HostPaths, pid: int) -> bytes:
    try:
        with open(root.proc(pid, "status"), "rb", buffering=0) as file:
            return file.read(_STATUS_BYTES)
    except OSError:
        return b""


def _comm(root: HostPaths, pid: int, tid: str) -> str:
    try:
        with open(root.proc(pid, "task", tid, "comm"), "rb", buffering=0) as file:
            return file.read(64).rstrip(b"\n").decode("utf-8", "backslashreplace")
    except OSError:
        return ""
