"""Memory that moves to the NUMA nodes of its vCPUs (`memory: migrate`)."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import Any, Final

from kata_pin.engine.counters import MetricRow, Shown, readings
from kata_pin.options.memory.keeper import MemoryMover
from kata_pin.service.options import Core, Running


class MovingMemory(MemoryMover, Running):
    """The option at work; it restores nothing."""

    def tasks(self) -> Iterator[Coroutine[object, object, None]]:
        """Yield what moves memory."""
        yield self.run()

    def facts(self, sandbox_id: str) -> Mapping[str, Any]:
        """Return where the memory of a sandbox is."""
        return {"memory": self.seen(sandbox_id)}

    def metrics(self) -> Iterable[Shown]:
        """Return how much was moved, and how much stays elsewhere."""
        return readings(METRICS, self) if self.migrates else ()


METRICS: Final[tuple[MetricRow[MemoryMover], ...]] = (
    MetricRow(
        "kata_pin_memory_moved_bytes_total",
        "Memory moved to the NUMA nodes of vCPUs.",
        lambda mover: mover.moved_bytes,
    ),
    MetricRow(
        "kata_pin_memory_remote_bytes",
        "Memory of sandboxes that was on other NUMA nodes than their vCPUs when last examined.",
        lambda mover: mover.remote_bytes,
    ),
)


def start(core: Core) -> MovingMemory:
    """Return the option at work."""
    containers = core.registry.containers
    return MovingMemory(core.root, core.live, core.node, core.sandboxes, containers, core.events)
