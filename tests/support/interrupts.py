"""This machine's interrupts as /proc shows them, read without kata-pin (proc_interrupts(5))."""

from __future__ import annotations

import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kata_pin.base.cpuset import CpuSet


@dataclass(frozen=True)
class Interrupt:
    """One with files of its own; `counts` by pCPU, `managed`: the mode says that none may move it.

    The mode says so since Linux 6.6; before, such a one refuses writes.
    """

    number: int
    text: str
    counts: dict[int, int]
    mask: CpuSet
    managed: bool


def read_interrupts() -> list[Interrupt]:
    """Return every interrupt that has a mask."""
    head, *lines = Path("/proc/interrupts").read_text().splitlines()
    cpus = [int(name.removeprefix("CPU")) for name in head.split()]
    found = []
    for line in lines:
        label, *words = line.split()
        file = Path(f"/proc/irq/{label.removesuffix(':')}/smp_affinity_list")
        with suppress(OSError):  # a row without a number, or one that ended
            counts = dict(zip(cpus, map(int, words), strict=False))
            mask, mode = CpuSet.parse(file.read_text()), file.stat().st_mode
            text = " ".join(words[len(cpus) :])
            managed = not mode & stat.S_IWUSR
            found.append(Interrupt(int(label.removesuffix(":")), text, counts, mask, managed))
    return found


def default_mask() -> CpuSet:
    """Return the pCPUs of interrupts that are yet to be set up."""
    bits = int(Path("/proc/irq/default_smp_affinity").read_text().replace(",", ""), 16)
    return CpuSet(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)
