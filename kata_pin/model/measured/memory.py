"""Where the memory of a sandbox is, and which of its VMM's mappings hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class NodeBytes(NamedTuple):
    """Bytes on one NUMA node; `huge` is the part in huge pages."""

    total: int
    huge: int


class Placed(NamedTuple):
    """One line of numa_maps: a mapping's start, its policy, its pages by node, and their size.

    `policy` is as the kernel writes it, such as `default` or `bind:1`; it has no blanks. `file` is
    the start of the path that is mapped, empty for anonymous memory. `huge`: of hugetlbfs.
    """

    start: int
    policy: str
    pages: Mapping[int, int]
    page_size: int
    file: str = ""
    huge: bool = False


class Extent(NamedTuple):
    """One line of maps: from where to where a mapping goes, and whether it is shared."""

    start: int
    end: int
    shared: bool


class FreeMemory(NamedTuple):
    """Memory of a NUMA node in bytes: all of it, what can be had, and free huge pages by size.

    `available` is free or clean and unused in the page cache.
    """

    total: int
    available: int
    huge: Mapping[int, int]
