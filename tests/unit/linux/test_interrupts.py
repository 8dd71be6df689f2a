"""Interrupts of a tree like /proc, and of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from errno import EMFILE, ENFILE
from pathlib import Path

import pytest

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import HostError
from kata_pin.linux import interrupts
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.linux.interrupts import (
    NO_NODE,
    InterruptTable,
    RowCounts,
    default_mask,
    read_interrupts,
)


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


def _count(root: Path, *numbers: int) -> None:
    """Write the counters with the kernel's widths, and an interrupt without files."""
    rows = ["           CPU0       CPU1"]
    for number, count in zip((24, 25, 26), numbers, strict=False):
        rows.append(f" {number}: {count:>10} {7:>10}   IO-APIC   {number}-edge      eth{number}")
    rows.append(f"LOC: {1:>10} {2:>10}   Local timer interrupts")
    (root / "proc/interrupts").write_text("\n".join(rows) + "\n")


def test_read_again(tmp_path: Path) -> None:
    """Counters alone make no other version; what fired is known, with its row before."""
    with closing(InterruptTable(_tree(tmp_path))) as table:
        _count(tmp_path, 5, 6)
        first = table.read()
        version = table.version
        _count(tmp_path, 5, 9)
        second = table.read()
        assert second[0] is first[0]
        ((before, now),) = table.fired
        assert (now.number, table.version) == (25, version)
        assert isinstance(now.row.counts, RowCounts)
        assert now.row.counts.since(before.counts, (0, 1)) == {0: 3}
        assert dict(now.row.counts) == {0: 9, 1: 7}
        table.read()
        assert not table.fired
        (tmp_path / "proc/irq/24/smp_affinity_list").write_text("1\n")
        assert [str(one.mask) for one in table.read()] == ["1", "1"]
        assert table.version > version


def test_counts_beyond_their_width(tmp_path: Path) -> None:
    """Rows are split then, and rows of other columns are not compared."""
    with closing(InterruptTable(_tree(tmp_path))) as table:
        _count(tmp_path, 12345678901, 6)
        table.read()
        _count(tmp_path, 12345678931, 6)
        table.read()
        ((before, now),) = table.fired
        assert isinstance(now.row.counts, RowCounts)
        assert now.row.counts.since(before.counts, (0, 1, 5)) == {0: 30}
        text = (tmp_path / "proc/interrupts").read_text().replace("CPU1", "CPU3")
        (tmp_path / "proc/interrupts").write_text(text)
        eth, _ = table.read()
        assert not table.fired
        assert isinstance(eth.row.counts, RowCounts)
        assert eth.row.counts.since(before.counts, (0, 3)) == {}


def test_a_device_that_is_bound_again(tmp_path: Path) -> None:
    """The old file reads nothing any more (the kernel says EIO), the new one is opened."""
    with closing(InterruptTable(_tree(tmp_path))) as table:
        _count(tmp_path, 5, 6)
        first = table.read()
        file = tmp_path / "proc/irq/24/smp_affinity_list"
        file.write_text("")
        file.unlink()
        file.write_text("2\n")
        found = table.read()
        assert [str(one.mask) for one in found] == ["2", "1"]
        assert found[1] is first[1]
        file.write_text("")
        file.unlink()
        assert [one.number for one in table.read()] == [25]


def test_more_interrupts_than_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose file is opened for each read is born once."""
    monkeypatch.setattr(interrupts, "MOST", 1)
    with closing(InterruptTable(_tree(tmp_path))) as table:
        _count(tmp_path, 5, 6)
        first = table.read()
        assert [one.number for one in table.born] == [24, 25]
        version = table.version
        assert all(now is then for now, then in zip(table.read(), first, strict=True))
        text = (tmp_path / "proc/interrupts").read_text().replace("CPU1", "CPU3")
        (tmp_path / "proc/interrupts").write_text(text)
        table.read()
        assert not table.born, "other pCPUs, the same interrupts"
        assert table.version > version


@pytest.mark.parametrize("errno", [EMFILE, ENFILE])
@pytest.mark.parametrize("file", ["smp_affinity_list", "effective_affinity_list", "node"])
def test_no_descriptor_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, errno: int
) -> None:
    """Nothing is taken for gone; what was born before that is born in the next read."""
    with closing(InterruptTable(_tree(tmp_path))) as table:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", _failing(f"irq/25/{file}", errno))
            with pytest.raises(HostError, match=f"irq/25/{file}"):
                table.read()
        assert [one.number for one in table.read()] == [24, 25]
        assert [one.number for one in table.born] == [24, 25]
        table.read()
        assert not table.born


def test_no_descriptor_is_left_for_a_known_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is one gone whose file is opened for each read."""
    monkeypatch.setattr(interrupts, "MOST", 0)
    with closing(InterruptTable(_tree(tmp_path))) as table:
        first = table.read()
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", _failing("irq/25/smp_affinity_list", EMFILE))
            with pytest.raises(HostError, match="irq/25"):
                table.read()
        assert table.read()[1] is first[1]
        assert not table.born


def _failing(file: str, errno: int) -> Callable[..., int]:
    """Return os.open with an error for one file."""
    real = os.open

    def fail(path: str, *rest: int) -> int:
        if str(path).endswith(file):
            raise OSError(errno, os.strerror(errno), path)
        return real(path, *rest)

    return fail


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
