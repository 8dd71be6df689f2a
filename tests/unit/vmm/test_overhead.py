"""Kernel threads by name, parent and flag, where no such kernel can be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from kata_pin.base.sandbox import PF_KTHREAD, Process, ProcessKey, Vmm
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import RoleSource, ThreadRole
from kata_pin.linux.files import HostRoot
from kata_pin.linux.proc import kernel_worker
from kata_pin.vmm.claims import Shims
from kata_pin.vmm.find import Helper, find_helpers, served_by
from tests.support.vmmhost import facts


def _process(key: ProcessKey, ppid: int, comm: str, flags: int = PF_KTHREAD) -> Process:
    return Process(key, ppid, comm, flags)


class _Table:
    """Processes of a Linux 6.1 host with vhost, as recorded from Kata 3.21."""

    processes = (
        _process(ProcessKey(1780, 1), 1768, "qemu-system-x86", 0),
        _process(ProcessKey(1785, 1), 2, "kvm-nx-lpage-recovery-1780"),
        _process(ProcessKey(1789, 1), 2, "vhost-1780"),
        _process(ProcessKey(1790, 1), 2, "vhost-1780"),
        _process(ProcessKey(1791, 1), 2, "vhost-17801"),
        _process(ProcessKey(1792, 1), 2, "vhost-178"),
        _process(ProcessKey(1793, 1), 1780, "vhost-1780"),
        _process(ProcessKey(1795, 1), 2, "vhost-1781"),
        _process(ProcessKey(1796, 9), 2, "vhost-1781"),
        _process(ProcessKey(1794, 1), 2, "kvm-pit/1780"),
    )

    def get(self, pid: int) -> Process | None:
        return next((one for one in self.processes if one.key.pid == pid), None)

    def all(self) -> Sequence[Process]:
        return self.processes

    def children(self, ppid: int) -> Sequence[Process]:
        return [one for one in self.processes if one.ppid == ppid]

    @property
    def kernel_workers(self) -> Mapping[int, Sequence[Process]]:
        named = [(kernel_worker(one.comm), one) for one in self.processes if one.flags]
        owners = {worker.owner for worker, _ in named if worker}
        return {tid: [p for worker, p in named if worker and worker.owner == tid] for tid in owners}


def test_kernel_threads_by_exact_name_and_parent(tmp_path: Path) -> None:
    """Only kthreadd's children, named after exactly one of the VMM's threads, and not before it."""
    (tmp_path / "proc").mkdir()
    host = replace(facts(HostRoot(str(tmp_path))), processes=_Table())
    vmm = Vmm("qemu", ProcessKey(1780, 1), 1768, "", "")

    def kernel(pid: int, role: ThreadRole, starttime: int = 1) -> Helper:
        return Helper(ProcessKey(pid, starttime), role, RoleSource.FLAGS)

    threads = [ThreadKey(1780, 1780, 1), ThreadKey(1780, 1781, 5)]
    assert find_helpers(host, vmm, "p1", threads, Shims(host)) == (
        kernel(1785, ThreadRole.KVM),
        kernel(1789, ThreadRole.VHOST),
        kernel(1790, ThreadRole.VHOST),
        kernel(1794, ThreadRole.KVM),
        kernel(1796, ThreadRole.VHOST, starttime=9),
    )


def test_whom_a_kernel_worker_serves(tmp_path: Path) -> None:
    """The process of the thread that its name says; no process for any other name."""
    status = tmp_path / "proc/1781/status"
    status.parent.mkdir(parents=True)
    status.write_text("Tgid:\t1780\n")
    root = HostRoot(str(tmp_path))
    names = ("vhost-1781", "kvm-nx-lpage-recovery-1781", "vhost-99", "vhost-", "kworker/1781")
    assert [served_by(root, name) for name in names] == [1780, 1780, 99, None, None]
