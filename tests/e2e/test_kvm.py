"""KVM inside the machine: real vCPU threads of a guest that does nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.idlevm import VCPUS, tids, vcpu_tids
from tests.e2e.node import Node


def test_kvm_is_there_where_promised(node: Node) -> None:
    """The AMD model has /dev/kvm, the Intel one has none under emulation."""
    assert Path("/dev/kvm").is_char_device() == node.kvm


def test_vcpu_threads_of_an_idle_vm_are_in_debugfs(
    node: Node, start_vm: Callable[..., int]
) -> None:
    """KVM names a thread of QEMU for each vCPU, and all of them sleep."""
    if not node.kvm:
        pytest.skip(f"{node.flavour} has no KVM inside")
    pid = start_vm()
    vcpus = vcpu_tids(pid)
    assert sorted(vcpus) == list(range(VCPUS))
    assert set(vcpus.values()) < tids(pid)
    assert pid not in vcpus.values()
    node.wait(lambda: _all_sleep(pid, vcpus), "idle vCPU threads asleep")
    before = _ticks(pid)
    time.sleep(1)  # an idle VM is told from a busy one by a stretch of time only
    assert _ticks(pid) - before <= os.sysconf("SC_CLK_TCK") // 5


def test_vhost_workers_have_the_kernels_form(node: Node, start_vm: Callable[..., int]) -> None:
    """vhost workers are threads of QEMU on 6.12, kernel threads of their own on 6.1."""
    if not node.kvm:
        pytest.skip(f"{node.flavour} has no KVM inside")
    pid = start_vm("-device", "vhost-vsock-pci,guest-cid=4242")
    name = f"vhost-{pid}"
    node.wait(lambda: bool(_named(name)), f"a worker {name}")
    assert {owner == pid for _, owner in _named(name)} == {node.kernel == "6.12"}


def _all_sleep(pid: int, vcpus: dict[int, int]) -> bool:
    return all(
        Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
        for tid in vcpus.values()
    )


def _ticks(pid: int) -> int:
    """Return the CPU time of a process in clock ticks (proc(5): utime and stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _named(name: str) -> list[tuple[int, int]]:
    """Return (tid, pid) of every thread of the machine with that name."""
    found = []
    for comm in Path("/proc").glob("[0-9]*/task/[0-9]*/comm"):
        try:
            if comm.read_text().strip() == name:
                found.append((int(comm.parts[-2]), int(comm.parts[-4])))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
