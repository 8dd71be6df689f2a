"""Where the memory of a sandbox is."""

from __future__ import annotations

from typing import NamedTuple


class NodeBytes(NamedTuple):
    """Bytes on one NUMA node; `huge` is the part in huge pages."""

    total: int
    huge: int
