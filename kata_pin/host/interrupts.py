"""The node's interrupts: who handles them, how often they fired where, and where they may go.

Files: /proc/interrupts; /proc/irq/N/{smp_affinity_list,effective_affinity_list,node}, readable by
everybody (kernel/irq/proc.c). An interrupt that ends while it is read is left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import closing
from typing import NamedTuple

from kata_pin.errors import HostError, ParseError
from kata_pin.host.files import read_bytes, read_once
from kata_pin.host.kept_files import NO_ROOM, KeptFiles
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.quiet.interrupts import NO_NODE, Interrupt, InterruptRow
from kata_pin.wire.kernel.interrupts import (
    MAX_TEXT,
    is_numbered,
    parse_columns,
    parse_row,
    recounted,
)
from kata_pin.wire.kernel.masks import parse_mask


class _Known(NamedTuple):
    """An interrupt as it was read last: its line and its mask's text, and what they meant."""

    path: str
    line: bytes
    mask: bytes
    interrupt: Interrupt


class InterruptTable:
    """Reads the node's interrupts again and again; what did not change is not parsed again.

    `version` grows with each change but of counters. `fired` are the interrupts whose counters
    changed since the read before, with their rows then; `born` are those that were set up since
    then, all of them after the first read. Whoever has one closes it.
    """

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._files = KeptFiles()
        self._known: dict[bytes, _Known] = {}
        self._head = b""
        self._columns: Mapping[int, int] = {}
        self.version = 0
        self.fired: list[tuple[InterruptRow, Interrupt]] = []
        self.born: list[Interrupt] = []

    def close(self) -> None:
        """Close the files that are read."""
        self._files.close()

    def read(self) -> tuple[Interrupt, ...]:
        """Return every interrupt that has files of its own, `effective` as it was first read.

        Raises HostError where /proc/interrupts cannot be read or no descriptor is left, ParseError
        for one that makes no sense.
        """
        path = self._root.proc("interrupts")
        try:
            head, *lines = read_bytes(path, MAX_TEXT).split(b"\n")
        except OSError as error:
            raise HostError("read", path, error.errno or 0) from error
        if head != self._head:
            self._columns = parse_columns(head)
            self._head, self._known = head, {}
            self.version += 1
        before, found = self._known, {}
        self.fired, self.born = [], []
        for line in lines:
            label = line[: line.find(b":")]
            known = before.get(label)
            if known is None and not is_numbered(line):
                continue
            now = None if known is None else self._again(line, known)
            if now is None:
                now = self._new(line)
            if now is not None:
                found[label] = now
                if now.path in self._files.opened:  # one that is set up again has other files
                    self.born.append(now.interrupt)
        if found.keys() != before.keys():
            self.version += 1
            self._files.keep_only({one.path for one in found.values()})
        self._known = found
        self._files.opened.clear()  # only now: what a read that failed opened is born in the next
        return tuple(one.interrupt for one in found.values())

    def _new(self, line: bytes) -> _Known | None:
        """Return an interrupt that was not there before, None if it has no files."""
        row = parse_row(line, self._columns)
        path = self._root.proc("irq", row.number, "smp_affinity_list")
        try:
            text = self._files.read(path)
            mask = CpuSet.parse(text.decode("ascii", "replace"))
        except (OSError, ParseError) as error:
            _raise_for_room(error, path)
            return None
        self.version += 1
        where = _cpus(self._root, row.number, "effective_affinity_list")
        node, managed = _node(self._root, row.number), is_managed(self._root, row.number)
        return _Known(path, line, text, Interrupt(row, mask, where, node, managed))

    def _again(self, line: bytes, known: _Known) -> _Known | None:
        """Return an interrupt that is known; None if it is another one, or gone."""
        path, before, mask_text, one = known
        try:
            text = self._files.read(path)
            if path in self._files.opened:
                return None
            if text == mask_text:
                if line == before:
                    return known
                mask = one.mask
            else:
                mask = CpuSet.parse(text.decode("ascii", "replace"))
        except (OSError, ParseError) as error:
            _raise_for_room(error, path)
            return None
        row = one.row if line == before else recounted(one.row, before, line)
        if row is None:
            return None
        now = Interrupt(row, mask, one.effective, one.node, one.managed)
        if mask is not one.mask:
            self.version += 1
        if row is not one.row:
            self.fired.append((one.row, now))
        return _Known(path, line, text, now)


def read_interrupts(root: HostRoot) -> tuple[Interrupt, ...]:
    """Return every interrupt that has files of its own; raises HostError and ParseError."""
    with closing(InterruptTable(root)) as table:
        return table.read()


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
    path = root.proc("irq", number, file)
    try:
        return CpuSet.parse(read_once(path).decode("ascii", "replace"))
    except (OSError, ParseError) as error:
        _raise_for_room(error, path)
        return EMPTY


def _node(root: HostRoot, number: int) -> int:
    path = root.proc("irq", number, "node")
    try:
        return int(read_once(path))
    except (OSError, ValueError) as error:
        _raise_for_room(error, path)
        return NO_NODE


def _raise_for_room(error: Exception, path: str) -> None:
    """Raise HostError where a file may be there: no descriptor was left to open it."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        raise HostError("read", path, error.errno or 0) from error
