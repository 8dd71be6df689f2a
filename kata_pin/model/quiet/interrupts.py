"""The node's numbered interrupts, as the kernel shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.cpuset import EMPTY, CpuSet

NO_NODE: Final = -1
"""The NUMA node of an interrupt that belongs to none (/proc/irq/N/node)."""

_VFIO: Final = re.compile(
    r"vfio-(?:msix?\[[0-9]+\]|intx)\(([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\)"
)


WIDTH: Final = 11
"""A number and the blank before it (kernel/irq/proc.c, show_interrupts)."""


class RowCounts(Mapping[int, int]):
    """The numbers of a row by pCPU, converted when they are asked for: most never are.

    `text` is the row's beginning, with its label, `places` says which number is a pCPU's. Each use
    raises ParseError for what is not one number per pCPU.
    """

    __slots__ = ("_places", "_start", "_words", "text")

    def __init__(self, places: Mapping[int, int], text: bytes) -> None:
        self._places = places
        self.text = text
        self._words: list[bytes] | None = None
        self._start: int | None = None

    def of(self, text: bytes) -> RowCounts:
        """Return the counts of another text with the same columns."""
        return RowCounts(self._places, text)

    @property
    def words(self) -> list[bytes]:
        """Return the numbers as they stand there, in the order of the columns."""
        if self._words is None:
            words = self.text.partition(b":")[2].split()
            if len(words) != len(self._places) or not b"".join(words).isdigit():
                text = self.text[:80].decode("ascii", "replace")
                raise ParseError("not one number per CPU", source="/proc/interrupts", text=text)
            self._words = words
        return self._words

    def __getitem__(self, cpu: int) -> int:
        return int(self.words[self._places[cpu]])

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def since(self, before: Mapping[int, int], cpus: Iterable[int]) -> dict[int, int]:
        """Return how often it fired on these pCPUs since an earlier row, by pCPU if it did."""
        if not isinstance(before, RowCounts) or before._places is not self._places:
            return {}
        grown = {}
        for cpu in cpus:
            place = self._places.get(cpu)
            if place is not None:
                now, then = self._number(place), before._number(place)
                if now != then:
                    grown[cpu] = _counted(now) - _counted(then)
        return {cpu: times for cpu, times in grown.items() if times > 0}

    def _number(self, place: int) -> bytes:
        """Return one number; if all have the same width, the others are not looked at."""
        if self._start is None:
            start = self.text.find(b":") + 1
            padded = len(self.text.rstrip()) - start == WIDTH * len(self._places)
            self._start = start if padded else 0
        if not self._start:
            return self.words[place]
        return self.text[self._start + WIDTH * place : self._start + WIDTH * (place + 1)]


def _counted(number: bytes) -> int:
    try:
        return int(number)
    except ValueError:
        text = number.decode("ascii", "replace")
        raise ParseError("not a number", source="/proc/interrupts", text=text) from None


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
