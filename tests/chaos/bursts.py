"""The part `hooks500`: so many hooks at once, as when a node starts all its pods after a boot."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.figures import Row
from tests.bench.hooks import many_at_once
from tests.bench.node import BenchNode
from tests.bench.service import service
from tests.support.qemu import Machine

SANDBOXES = 10


def measure(hooks: int, _only: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows; BenchError if a message was lost, or counted twice."""
    with BenchNode() as node:
        node.start(SANDBOXES, Machine(boot=2, maximum=2))
        with service(node, nri={"enabled": "no"}) as daemon:
            yield from many_at_once(node, daemon, hooks)
