"""Thread names of the VMMs that Kata knows, and names that only look like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.model.sandbox import Vmm, VmmKind
from kata_pin.model.thread import ProcessKey, ThreadRole
from kata_pin.vmm.names import NamedRole, role_of
from tests.support import recordings


def _vmm(kind: VmmKind, *iothreads: str) -> Vmm:
    return Vmm(kind, ProcessKey(1, 1), 1, "", "", iothreads=iothreads)


def _vcpu(index: int) -> NamedRole:
    return NamedRole(ThreadRole.VCPU, vcpu=index)


@pytest.mark.parametrize(
    ("kind", "comm", "said"),
    [
        (VmmKind.QEMU, "CPU 0/KVM", _vcpu(0)),
        (VmmKind.QEMU, "CPU 15/TCG", _vcpu(15)),
        (VmmKind.QEMU, "CPU 1/KVM2", None),
        (VmmKind.QEMU, "CPU x/KVM", None),
        (VmmKind.QEMU, "CPU 99999/KVM", None),
        (VmmKind.QEMU, "ALL CPUs/TCG", None),
        (VmmKind.QEMU, "qemu-system-x86", None),
        (VmmKind.QEMU, "vcpu0", None),
        (VmmKind.QEMU, "IO mon_iothread", NamedRole(ThreadRole.EMULATOR)),
        (VmmKind.QEMU, "IO iot0", NamedRole(ThreadRole.IOTHREAD, iothread="iot0")),
        (VmmKind.QEMU, "IO other", NamedRole(ThreadRole.IOTHREAD)),
        (VmmKind.CLOUD_HYPERVISOR, "vcpu12", _vcpu(12)),
        (VmmKind.CLOUD_HYPERVISOR, "vcpu12a", None),
        (VmmKind.CLOUD_HYPERVISOR, "CPU 0/KVM", None),
        (VmmKind.FIRECRACKER, "fc_vcpu 3", _vcpu(3)),
        (VmmKind.FIRECRACKER, "fc_vcpu3", _vcpu(3)),
        (VmmKind.FIRECRACKER, "fc_vmm", None),
        (VmmKind.DRAGONBALL, "db_vcpu2", _vcpu(2)),
        (
            VmmKind.DRAGONBALL,
            "blk_iothread_q0",
            NamedRole(ThreadRole.IOTHREAD, iothread="blk_iothread_q0"),
        ),
        (VmmKind.DRAGONBALL, "tokio-runtime-w", None),
    ],
)
def test_names(kind: VmmKind, comm: str, said: NamedRole | None) -> None:
    """Each VMM's own names only, whole, and without numbers that no vCPU has."""
    assert role_of(_vmm(kind, "iot0"), comm) == said


def test_a_name_shared_by_two_iothreads_names_neither() -> None:
    """The kernel cuts names: two long ids may look the same."""
    said = role_of(_vmm(VmmKind.QEMU, "indep_iothread_0", "indep_iothread_1"), "IO indep_iothre")
    assert said == NamedRole(ThreadRole.IOTHREAD)


@pytest.mark.parametrize("path", recordings.files("**/qemu-threads.txt"), ids=recordings.label)
def test_recorded_threads(path: Path) -> None:
    """Kata names no thread by default; with its debug switch vCPUs, and never its iothread."""
    threads = recordings.threads(path)
    vmm = _vmm(VmmKind.QEMU, "iothread-1122876e2a9e5c87")
    said = [role_of(vmm, thread.comm) for thread in threads]
    if "debug-and-extra-monitor" in str(path):
        vcpus = [one.vcpu for one in said if one is not None and one.role is ThreadRole.VCPU]
        assert vcpus == [0, 1, 15, 14, 13, 12]
        assert not any(one is not None and one.role is ThreadRole.IOTHREAD for one in said)
    else:
        assert said == [None] * len(threads)
