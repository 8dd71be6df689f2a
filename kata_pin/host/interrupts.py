"""The node's interrupts: who handles them, how often they fired where, and where they may go.

Files: /proc/interrupts; /proc/irq/N/{smp_affinity_list,effective_affinity_list,node}, readable by
everybody (kernel/irq/proc.c). An interrupt that ends while it is read is left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kata_pin.errors import HostError, ParseError
from kata_pin.host.files import read_bytes, read_once
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.quiet.interrupts import NO_NODE, Interrupt
from kata_pin.wire.kernel.interrupts import MAX_TEXT, is_numbered, parse_columns, parse_row
from kata_pin.wire.kernel.masks import parse_mask


@dataclass(frozen=True, slots=True)
class _Known:
    """An interrupt as it was read last: its line and its mask's text, and what they meant."""

    line: bytes
    mask: bytes
    interrupt: Interrupt


class InterruptTable:
    """Reads the node's interrupts again and again; what did not change is not parsed again."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._folder = root.proc("irq")
        self._known: dict[bytes, _Known] = {}
        self._head = b""

    def read(self) -> tuple[Interrupt, ...]:
        """Return every interrupt that has files of its own, `effective` as it was first read.

        Raises HostError where /proc/interrupts cannot be read, ParseError for one that makes no
        sense.
        """
        path = self._root.proc("interrupts")
        try:
            head, *lines = read_bytes(path, MAX_TEXT).split(b"\n")
        except OSError as error:
            raise HostError("read", path, error.errno or 0) from error
        columns = parse_columns(head)
        before, self._known = self._known if head == self._head else {}, {}
        self._head = head
        for line in filter(is_numbered, lines):
            label = line.partition(b":")[0].strip()
            found = self._one(line, int(label), before.get(label), columns)
            if found is not None:
                self._known[label] = found
        return tuple(one.interrupt for one in self._known.values())

    def _one(
        self, line: bytes, number: int, known: _Known | None, columns: Sequence[int]
    ) -> _Known | None:
        """Return an interrupt as it is now, None if it is gone."""
        try:
            text = read_once(f"{self._folder}/{number}/smp_affinity_list")
            if known is not None and known.mask == text:
                if known.line == line:
                    return known
                mask = known.interrupt.mask
            else:
                mask = CpuSet.parse(text.decode("ascii", "replace"))
        except (OSError, ParseError):
            return None
        row = parse_row(line, columns)
        if known is not None and known.interrupt.row.text == row.text:
            return _Known(line, text, replace(known.interrupt, row=row, mask=mask))
        where = _cpus(self._root, number, "effective_affinity_list")
        node, managed = _node(self._root, number), is_managed(self._root, number)
        return _Known(line, text, Interrupt(row, mask, where, node, managed))


def read_interrupts(root: HostRoot) -> tuple[Interrupt, ...]:
    """Return every interrupt that has files of its own; raises HostError and ParseError."""
    return InterruptTable(root).read()


def default_mask(root: HostRoot) -> CpuSet:
    """Return the pCPUs of interrupts that are yet to be set up.

    Raises HostError where the file cannot be read, ParseError for one that is no mask.
    """
    path = root.proc("irq", "default_smp_affinity")
    try:
        return parse_mask(read_once(path), path)
    except OSError as error:
        raise HostError("read", path, error.errno or 0) from error


def is_managed(root: HostRoot, number: int) -> bool:
    """Return whether nobody may move an interrupt, as the mode of its file says (see Interrupt)."""
    try:
        mode = os.stat(root.proc("irq", number, "smp_affinity_list")).st_mode
    except OSError:
        return False
    return not mode & stat.S_IWUSR


def _cpus(root: HostRoot, number: int, file: str) -> CpuSet:
    try:
        return CpuSet.parse(read_once(root.proc("irq", number, file)).decode("ascii", "replace"))
    except (OSError, ParseError):
        return EMPTY


def _node(root: HostRoot, number: int) -> int:
    try:
        return int(read_once(root.proc("irq", number, "node")))
    except (OSError, ValueError):
        return NO_NODE
