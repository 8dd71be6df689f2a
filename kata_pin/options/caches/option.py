"""Groups of resctrl: what each sandbox uses of caches and memory bandwidth (`resctrl`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from kata_pin.base.counters import CacheUse
from kata_pin.base.sandbox import Sandbox
from kata_pin.engine.counters import MetricRow, Shown, readings
from kata_pin.options.caches.keeper import CacheGroups, CacheGroupTable, remove_group
from kata_pin.service.options import Core, Running


class Caches(CacheGroups, Running):
    """The option at work."""

    def facts(self, sandbox_id: str) -> Mapping[str, Any]:
        """Return the group of a sandbox."""
        return {"cache": self.seen(sandbox_id)}

    def metrics(self) -> Iterable[Shown]:
        """Return how many sandboxes are counted, and what the first `metrics.sandboxes` use."""
        return readings(METRICS, self) if self.settings.enabled else ()

    def groups(self) -> Mapping[str, float]:
        """Return the number of groups by state."""
        incomplete = sum(1 for one in self.held if (seen := self.seen(one)) and seen.problem)
        return {"complete": len(self.held) - incomplete, "incomplete": incomplete}

    def uses(
        self, amounts: Callable[[CacheUse], Mapping[tuple[str, ...], float | None]]
    ) -> Mapping[tuple[str, ...], float] | None:
        """Return amounts of the first `metrics.sandboxes`, by sandbox, pod and further labels."""
        first = sorted(self.held)[: self._live.now.metrics.sandboxes]
        used = {one: use for one in first if (use := self.use(one)) is not None}
        if not self._live.now.metrics.sandboxes:
            return None
        return {
            (one, Sandbox(one, self._containers(one)).pod, *labels): amount
            for one, use in used.items()
            for labels, amount in amounts(use).items()
            if amount is not None
        }

    async def give_back(self, ids: Collection[str] | None) -> Mapping[str, Any]:
        """Remove groups; the record of one that cannot be removed stays for the next daemon."""
        for sandbox_id, class_name in self._table.all():
            if ids is None or sandbox_id in ids:
                with suppress(OSError):
                    remove_group(self._table, self._root.calls, sandbox_id, class_name)
        return {}


def start(core: Core) -> Caches:
    """Return the option at work; raises StateError."""
    return Caches(
        core.root,
        core.live,
        CacheGroupTable(core.registry),
        core.sandboxes,
        core.registry.containers,
        core.kata_pinning.annotations,
    )


METRICS: Final[tuple[MetricRow[Caches], ...]] = (
    MetricRow(
        "kata_pin_cache_groups",
        "Sandboxes whose caches resctrl counts, and those where that fails, at least in part.",
        Caches.groups,
        {"state": ("complete", "incomplete")},
        "`show` says why.",
    ),
    MetricRow(
        "kata_pin_sandbox_l3_bytes",
        "Bytes of the L3 caches that a sandbox's threads fill.",
        lambda caches: caches.uses(lambda use: {(): use.occupancy}),
        {"sandbox": (), "pod": ()},
        "Only with `metrics.sandboxes`.",
    ),
    MetricRow(
        "kata_pin_sandbox_memory_bytes_total",
        "Bytes between the L3 caches and memory for a sandbox, in all and on the same NUMA node.",
        lambda caches: caches.uses(lambda use: {("total",): use.total, ("local",): use.local}),
        {"sandbox": (), "pod": (), "scope": ("total", "local")},
        "Since the sandbox's group was made; only with `metrics.sandboxes`.",
    ),
)
