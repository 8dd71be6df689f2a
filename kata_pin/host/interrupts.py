"""The node's interrupts: who handles them, how often they fired where, and where they may go.

Files: /proc/interrupts; /proc/irq/N/{smp_affinity_list,effective_affinity_list,node}, readable by
everybody (kernel/irq/proc.c). An interrupt that ends while it is read is left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final

from kata_pin.errors import HostError, ParseError
from kata_pin.host.files import read_bytes, read_once
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.quiet.interrupts import NO_NODE, Interrupt, InterruptRow
from kata_pin.wire.kernel.interrupts import MAX_TEXT, parse_rows
from kata_pin.wire.kernel.masks import parse_mask

_GONE: Final = (FileNotFoundError, ProcessLookupError, NotADirectoryError)


def read_interrupts(root: HostRoot) -> tuple[Interrupt, ...]:
    """Return every interrupt that has a file of its own.

    Raises HostError where /proc/interrupts cannot be read, ParseError for one that makes no sense.
    """
    return tuple(
        Interrupt(
            row,
            mask,
            _cpus(root, row.number, "effective_affinity_list"),
            _node(root, row.number),
            is_managed(root, row.number),
        )
        for row in read_rows(root)
        for mask in masks(root, row)
    )


def read_rows(root: HostRoot) -> tuple[InterruptRow, ...]:
    """Return the numbered rows of /proc/interrupts; raises HostError and ParseError."""
    path = root.proc("interrupts")
    try:
        return parse_rows(read_bytes(path, MAX_TEXT))
    except OSError as error:
        raise HostError("read", path, error.errno or 0) from error


def masks(root: HostRoot, row: InterruptRow) -> Iterator[CpuSet]:
    """Yield the pCPUs that an interrupt is allowed; nothing for one that is gone."""
    mask = _cpus(root, row.number, "smp_affinity_list")
    if mask:
        yield mask


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
    except (*_GONE, OSError, ParseError):
        return EMPTY


def _node(root: HostRoot, number: int) -> int:
    try:
        return int(read_once(root.proc("irq", number, "node")))
    except (OSError, ValueError):
        return NO_NODE
