"""Kernel threads by name, parent and flag, where no such kernel can be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kata_pin.host.root import HostRoot
from kata_pin.model.sandbox import Vmm
from kata_pin.model.thread import PF_KTHREAD, ProcessKey, RoleSource, ThreadRole
from kata_pin.vmm.host_access import ProcessFacts
from kata_pin.vmm.overhead import Helper, find_helpers
from tests.support.vmmhost import facts


@dataclass(frozen=True)
class _Process:
    key: ProcessKey
    ppid: int
    comm: str
    flags: int = PF_KTHREAD


class _Table:
    """Processes of a Linux 6.1 host with vhost, as recorded from Kata 3.21."""

    processes = (
        _Process(ProcessKey(1780, 1), 1768, "qemu-system-x86", 0),
        _Process(ProcessKey(1785, 1), 2, "kvm-nx-lpage-recovery-1780"),
        _Process(ProcessKey(1789, 1), 2, "vhost-1780"),
        _Process(ProcessKey(1790, 1), 2, "vhost-1780"),
        _Process(ProcessKey(1791, 1), 2, "vhost-17801"),
        _Process(ProcessKey(1792, 1), 2, "vhost-178"),
        _Process(ProcessKey(1793, 1), 1780, "vhost-1780"),
        _Process(ProcessKey(1794, 1), 2, "kvm-pit/1780"),
    )

    def get(self, pid: int) -> ProcessFacts | None:
        return next((one for one in self.processes if one.key.pid == pid), None)

    def all(self) -> Sequence[ProcessFacts]:
        return self.processes

    def children(self, ppid: int) -> Sequence[ProcessFacts]:
        return [one for one in self.processes if one.ppid == ppid]

    def kernel_threads(self, comm: str) -> Sequence[ProcessFacts]:
        return [one for one in self.processes if one.comm == comm and one.flags & PF_KTHREAD]


def test_kernel_threads_by_exact_name_and_parent(tmp_path: Path) -> None:
    """Only kthreadd's children, and only those whose name ends in exactly this VMM's pid."""
    (tmp_path / "proc").mkdir()
    host = replace(facts(HostRoot(str(tmp_path))), processes=_Table())
    vmm = Vmm("qemu", ProcessKey(1780, 1), 1768, "", "")

    def kernel(pid: int, role: ThreadRole) -> Helper:
        return Helper(ProcessKey(pid, 1), role, RoleSource.FLAGS)

    assert find_helpers(host, vmm, "p1") == (
        kernel(1785, ThreadRole.KVM),
        kernel(1789, ThreadRole.VHOST),
        kernel(1790, ThreadRole.VHOST),
        kernel(1794, ThreadRole.KVM),
    )
