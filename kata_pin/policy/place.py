"""Where every thread of a sandbox should run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.node import Node
from kata_pin.model.placement import Placement
from kata_pin.model.sandbox import Sandbox
from kata_pin.model.thread import Thread, ThreadKey, ThreadRole
from kata_pin.policy.mask import sandbox_mask


def place(
    sandbox: Sandbox,
    threads: Sequence[Thread],
    node: Node,
    *,
    kept: Mapping[ThreadKey, int] | None = None,
    first_seen: Mapping[ThreadRole, CpuSet] | None = None,
    allocated: Mapping[str, CpuSet] | None = None,
    pool: CpuSet = EMPTY,
) -> Placement:
    """Return the placement of the sandbox's threads (work in progress: decides the mask only)."""
    del threads, kept, first_seen
    mask = sandbox_mask(sandbox, node, allocated=allocated, pool=pool)
    return Placement(sandbox.id, mask)
