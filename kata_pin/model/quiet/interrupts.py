"""The node's numbered interrupts, as the kernel shows them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kata_pin.model.cpuset import EMPTY, CpuSet

NO_NODE: Final = -1
"""The NUMA node of an interrupt that belongs to none (/proc/irq/N/node)."""

_VFIO: Final = re.compile(
    r"vfio-(?:msix?\[[0-9]+\]|intx)\(([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\)"
)


@dataclass(frozen=True, slots=True)
class InterruptRow:
    """One numbered row of /proc/interrupts.

    `text` is everything behind the counts: chip, trigger and handlers, with single spaces. With the
    number it identifies the interrupt: a device that is bound again can get an old number.
    `handlers` are the names of those who handle it, several where a line is shared. `counts` has
    how often it fired since boot, by pCPU that is online.
    """

    number: int
    text: str
    handlers: tuple[str, ...]
    counts: Mapping[int, int] = field(hash=False)

    @property
    def name(self) -> str:
        """Return what people know it by: its handlers, else its chip."""
        return ", ".join(self.handlers) or self.text

    @property
    def vfio(self) -> frozenset[str]:
        """Return the PCI addresses of devices that VFIO hands to VMs (vfio_pci_intrs.c)."""
        if "vfio-" not in self.text:
            return frozenset()
        return frozenset(found[1] for found in map(_VFIO.match, self.handlers) if found)


@dataclass(frozen=True, slots=True)
class Interrupt:
    """An interrupt and where it may go.

    `mask` are the pCPUs that it is allowed, `effective` the one that the kernel chose (it changes
    at the next interrupt, not when the mask is written; empty where unknown), `node` the device's
    NUMA node or NO_NODE. `managed`: the kernel places it itself and lets nobody move it; known from
    the file's mode since Linux 6.6 or so, before that only by an attempt.
    """

    row: InterruptRow
    mask: CpuSet
    effective: CpuSet = EMPTY
    node: int = NO_NODE
    managed: bool = False

    @property
    def number(self) -> int:
        """Return its number."""
        return self.row.number
