"""Interrupts of a tree like /proc, and of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.errors import HostError
from kata_pin.host.interrupts import default_mask, read_interrupts
from kata_pin.host.root import HOST, HostRoot
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.quiet.interrupts import NO_NODE


def _tree(root: Path) -> HostRoot:
    proc = root / "proc"
    for number, mask, effective, node, mode in (
        (24, "0-3", "2", "0", 0o644),
        (25, "1", "", "-1", 0o444),
    ):
        folder = proc / "irq" / str(number)
        folder.mkdir(parents=True)
        (folder / "smp_affinity_list").write_text(f"{mask}\n")
        (folder / "smp_affinity_list").chmod(mode)
        (folder / "effective_affinity_list").write_text(f"{effective}\n")
        (folder / "node").write_text(f"{node}\n")
    (proc / "irq" / "default_smp_affinity").write_text("f\n")
    (proc / "interrupts").write_text(
        "      CPU0  CPU1\n 24: 1 2  IO-APIC  5-edge  eth0\n 25: 3 4  PCI-MSI  6-edge  nvme0q1\n"
        " 26: 0 0  PCI-MSI  7-edge  gone\n"
    )
    return HostRoot(str(root))


def test_a_tree(tmp_path: Path) -> None:
    """One that has no files any more is left out."""
    root = _tree(tmp_path)
    eth, nvme = read_interrupts(root)
    assert (eth.number, eth.mask, eth.effective) == (24, CpuSet.parse("0-3"), CpuSet({2}))
    assert (eth.node, eth.managed, eth.row.name) == (0, False, "eth0")
    assert (nvme.effective, nvme.node, nvme.managed) == (EMPTY, NO_NODE, True)
    assert default_mask(root) == CpuSet.parse("0-3")


def test_no_interrupts(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(HostError, match="proc/interrupts"):
        read_interrupts(HostRoot(str(tmp_path)))
    with pytest.raises(HostError, match="default_smp_affinity"):
        default_mask(HostRoot(str(tmp_path)))


def test_this_machine() -> None:
    """Every interrupt here has a mask of pCPUs that the default mask may lack."""
    found = read_interrupts(HOST)
    assert found
    assert default_mask(HOST)
    assert all(one.mask and one.row.counts for one in found)
