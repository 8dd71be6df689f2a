"""Metrics of caches and memory bandwidth, as resctrl counts them, and of memory that is moved."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kata_pin.daemon.isolation.cache_groups import CacheGroups
from kata_pin.daemon.isolation.memory import MemoryMover
from kata_pin.daemon.store.containers import Registry
from kata_pin.model.sandbox import Sandbox


def cache_metrics(groups: CacheGroups, registry: Registry, single: int) -> Iterator[Metric]:
    """Yield how many sandboxes are counted, and what the first `single` of them use."""
    if not groups.settings.enabled:
        return
    held = sorted(groups.held)
    incomplete = sum(1 for one in held if (seen := groups.seen(one)) and seen.problem)
    family = GaugeMetricFamily(
        "kata_pin_cache_groups",
        "Sandboxes whose caches resctrl counts, and those where that fails, at least in part.",
        labels=("state",),
    )
    family.add_metric(("complete",), len(held) - incomplete)
    family.add_metric(("incomplete",), incomplete)
    yield family
    if not single:
        return
    occupancy = GaugeMetricFamily(
        "kata_pin_sandbox_l3_bytes",
        "Bytes of the L3 caches that a sandbox's threads fill.",
        labels=("sandbox", "pod"),
    )
    moved = CounterMetricFamily(
        "kata_pin_sandbox_memory_bytes",
        "Bytes between the L3 caches and memory for a sandbox, in all and on the same NUMA node.",
        labels=("sandbox", "pod", "scope"),
    )
    for sandbox_id in held[:single]:
        use = groups.use(sandbox_id)
        if use is None:
            continue
        labels = sandbox_id, Sandbox(sandbox_id, registry.containers(sandbox_id)).pod
        if use.occupancy is not None:
            occupancy.add_metric(labels, use.occupancy)
        for scope, value in (("total", use.total), ("local", use.local)):
            if value is not None:
                moved.add_metric((*labels, scope), value)
    yield from (occupancy, moved)


def memory_metrics(mover: MemoryMover) -> Iterator[Metric]:
    """Yield how much memory was moved to the NUMA nodes of vCPUs, and how much stays elsewhere."""
    if not mover.migrates:
        return
    yield CounterMetricFamily(
        "kata_pin_memory_moved_bytes",
        "Memory moved to the NUMA nodes of vCPUs.",
        value=mover.moved_bytes,
    )
    yield GaugeMetricFamily(
        "kata_pin_memory_remote_bytes",
        "Memory of sandboxes that was on other NUMA nodes than their vCPUs when last examined.",
        value=mover.remote_bytes,
    )
