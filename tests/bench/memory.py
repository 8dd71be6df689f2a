"""What one sandbox takes of the daemon's memory: objects of Python, as tracemalloc counts them.

Stand-ins of 21 threads (standins.py) run before anything is counted, so that the bench's own
objects are not. Counted is what a whole Daemon in this process allocates for the sandboxes that it
adopts and audits, and what of it stays when they have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from tests.bench.figures import Row
from tests.bench.node import BenchNode
from tests.bench.service import LocalService, local_service
from tests.bench.standins import StandIns

LIVING = "memory of one sandbox, 21 threads"
STAYS = "the same, what stays when it has ended"
FIRST = 10
"""Sandboxes that are there before: with them tables and caches that all share are made."""


class SandboxMemory(NamedTuple):
    """KiB for one sandbox: while it lives, and what stays of it."""

    living: float
    stays: float


def measure(node: BenchNode, count: int) -> Iterator[Row]:
    """Yield both figures."""
    taken = asyncio.run(taken_by(node, count))
    living, stays = taken
    yield Row(LIVING, living, "KiB", count, bar=24.0, bar_on_ratio=False)
    yield Row(STAYS, stays, "KiB", count, bar=2.0, bar_on_ratio=False)


async def taken_by(node: BenchNode, count: int) -> SandboxMemory:
    """Return what each of `count` sandboxes takes."""
    with contextlib.closing(StandIns(node)) as stand_ins:
        stand_ins.start(FIRST + count)
        tracemalloc.start()
        try:
            executables = (str(stand_ins.executable),)
            config = replace(node.config(), hypervisors=executables)
            async with local_service(config) as daemon:
                before = await _settled(daemon, stand_ins.announce(0, FIRST))
                ids = stand_ins.announce(FIRST, FIRST + count)
                living = await _settled(daemon, ids)
                stand_ins.end(FIRST)
                async with asyncio.timeout(30.0):
                    while set(ids) & set(daemon.parts.sandboxes.ids):
                        await asyncio.sleep(0.05)
                stays = await _settled(daemon, [])
                return SandboxMemory((living - before) / count, (stays - before) / count)
        finally:
            tracemalloc.stop()


async def _settled(daemon: LocalService, ids: list[str]) -> float:
    """Return the KiB that are taken once these sandboxes are adopted, pinned and audited."""
    await daemon.parts.audits.deep()
    await daemon.settle(ids)
    for _ in range(2):
        await daemon.parts.audits.deep()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 1024
