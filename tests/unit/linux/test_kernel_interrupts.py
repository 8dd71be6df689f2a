"""/proc/interrupts and /proc/softirqs of kernels 6.1, 6.12 and 6.18, and of arm64 by its source."""

from __future__ import annotations

import pytest

from kata_pin.base.counters import InterruptKind
from kata_pin.base.errors import ParseError
from kata_pin.linux.interrupts import (
    InterruptRow,
    is_numbered,
    parse_columns,
    parse_interrupts,
    parse_row,
    parse_softirqs,
)
from tests.support.recordings import DATA

KERNEL = DATA / "kernel"
K = InterruptKind


@pytest.mark.parametrize("kernel", ["6.1", "6.12", "6.18"])
def test_all_rows_have_a_kind(kernel: str) -> None:
    """The kinds add up to what the file has, but for rows that count something twice."""
    data = (KERNEL / kernel / "interrupts").read_bytes()
    found = parse_interrupts(data, {1, 77})
    assert list(found) == [1]
    rows = [line.split() for line in data.decode().splitlines()[1:]]
    counted = [row for row in rows if row[0] not in {"TLB:", "ERR:", "MIS:"}]
    assert sum(found[1].values()) == sum(int(row[2]) for row in counted)
    by_label = {row[0]: int(row[2]) for row in counted}
    assert found[1][K.TICK] == by_label["LOC:"]
    assert found[1][K.RESCHEDULE] == by_label["RES:"]
    assert found[1][K.CALL] == by_label["CAL:"]
    assert found[1][K.DEVICE] == sum(n for label, n in by_label.items() if label[0].isdigit())


def test_arm64_s_rows() -> None:
    """There the timer is a numbered row, and the IPIs have only descriptions."""
    data = (
        b"           CPU0       CPU1\n"
        b" 11:         10         20     GICv3  27 Level     arch_timer\n"
        b" 14:          1          2     GICv3  33 Level     uart-pl011\n"
        b"IPI0:         3          4       Rescheduling interrupts\n"
        b"IPI1:         5          6       Function call interrupts\n"
        b"IPI2:         7          8       CPU stop interrupts\n"
        b"Err:          0\n"
    )
    assert parse_interrupts(data, {1})[1] == {
        K.TICK: 20, K.RESCHEDULE: 4, K.CALL: 6, K.DEVICE: 2, K.GUEST: 0, K.OTHER: 8,
    }  # fmt: skip


def test_columns_go_by_name() -> None:
    """Only CPUs that are online have a column."""
    data = b"  CPU0  CPU5\nLOC:  1  2  Local timer interrupts\n"
    assert parse_interrupts(data, {0, 1, 5})[5][K.TICK] == 2
    assert parse_softirqs(b"  CPU0  CPU5\n RCU:  1  2\n", {5}) == {5: {"RCU": 2}}


def test_soft_interrupts_by_name() -> None:
    """Every vector of the kernel, by its name."""
    found = parse_softirqs((KERNEL / "6.12" / "softirqs").read_bytes(), {2})
    assert found[2]["SCHED"] == 415
    assert set(found[2]) == {
        "HI", "TIMER", "NET_TX", "NET_RX", "BLOCK", "IRQ_POLL", "TASKLET", "SCHED", "HRTIMER",
        "RCU",
    }  # fmt: skip


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"CPU0 X\n", b"CPU0\nLOC: x tick\n", b"CPU0\nLOC: -1\n", b"CPU" + b"1" * 9]
)
def test_another_text_is_refused(data: bytes) -> None:
    """Nothing is guessed."""
    with pytest.raises(ParseError):
        parse_interrupts(data, {0})
    with pytest.raises(ParseError):
        parse_softirqs(data, {0})


ROWS = (
    b"           CPU0       CPU2\n"
    b"  9:          3          0   IO-APIC   9-fasteoi   acpi, i801_smbus\n"
    b" 24:          1          7   PCI-MSI 524288-edge      nvme0q0\n"
    b" 27:          0          0   IO-APIC 123-edge\n"
    b" 31:          5          6  PCI-MSIX-0000:00:02.0   1-edge      vfio-msix[1](0000:3b:00.1)\n"
    b"NMI:          0          0   Non-maskable interrupts\n"
    b"ERR:          0\n"
)


def parse_rows(data: bytes) -> list[InterruptRow]:
    """Return the numbered interrupts in the file's order."""
    head, *lines = data.split(b"\n")
    columns = parse_columns(head)
    return [parse_row(line, columns) for line in lines if is_numbered(line)]


def test_numbered_rows() -> None:
    """Counts by the pCPU of the column, handlers behind two spaces, everything else as identity."""
    acpi, nvme, unused, vfio = parse_rows(ROWS)
    assert (acpi.number, acpi.handlers, acpi.counts) == (9, ("acpi", "i801_smbus"), {0: 3, 2: 0})
    assert acpi.text == "IO-APIC 9-fasteoi acpi, i801_smbus"
    assert (nvme.name, nvme.counts[2]) == ("nvme0q0", 7)
    assert (unused.handlers, unused.name) == ((), "IO-APIC 123-edge")
    assert vfio.vfio == {"0000:3b:00.1"}
    assert not nvme.vfio


@pytest.mark.parametrize("kernel", ["6.1", "6.12", "6.18"])
def test_numbered_rows_of_real_kernels(kernel: str) -> None:
    """Every numbered row has handlers, and as many counts as there are pCPUs."""
    data = (KERNEL / kernel / "interrupts").read_bytes()
    rows = parse_rows(data)
    labels = [line.split()[0] for line in data.splitlines()[1:]]
    assert [b"%d:" % row.number for row in rows] == [one for one in labels if one[:-1].isdigit()]
    assert all(row.handlers for row in rows)
    assert {len(row.counts) for row in rows} == {data.split(b"\n")[0].count(b"CPU")}


@pytest.mark.parametrize(
    "bad", [b"", b"no CPUs\n", b" CPU0 CPU1\n 4: 1\n", b" CPU0\n 4: -1 x  y\n"]
)
def test_rows_without_sense(bad: bytes) -> None:
    """A row that cannot be read is an error with its label."""
    with pytest.raises(ParseError, match="/proc/interrupts"):
        parse_rows(bad)
