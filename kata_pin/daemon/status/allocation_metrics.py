"""Metrics of our own allocator; none at all while the configuration wants none.

Names and labels are a contract with dashboards (docs/metrics.md). Labels have few values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.push import CRI, NRI, Pusher
from kata_pin.model.alloc import RefusalKind
from kata_pin.model.settings import CpuClass


def alloc_metrics(allocator: Allocator, pusher: Pusher) -> Iterator[Metric]:
    """Yield what there is to say now."""
    if not allocator.on:
        return
    deciding, state = allocator.decides, allocator.state
    yield GaugeMetricFamily(
        "kata_pin_alloc_deciding",
        "Whether kata-pin decides cpusets now (0: suspended).",
        int(deciding),
    )
    cpus = GaugeMetricFamily("kata_pin_alloc_cpus", "pCPUs by pool.", labels=("pool",))
    for pool in ("exclusive", "shared", "reserved", "housekeeping"):
        cpus.add_metric((pool,), len(getattr(state, pool)))
    yield cpus
    containers = GaugeMetricFamily(
        "kata_pin_alloc_containers", "Containers by class.", labels=("class",)
    )
    found = Counter(grant.cpu_class for grant in allocator.containers())
    for cpu_class in CpuClass:
        containers.add_metric((cpu_class.value,), found[cpu_class])
    yield containers
    yield GaugeMetricFamily(
        "kata_pin_alloc_pending",
        "Containers whose newest cpuset is not applied yet.",
        len(allocator.ledger.pending(allocator.effective)),
    )
    conflicts = GaugeMetricFamily(
        "kata_pin_alloc_rival_pods",
        "Pods that show another NRI plugin that sets cpusets, asked before kata-pin or after it.",
        labels=("asked",),
    )
    conflicts.add_metric(("before",), allocator.conflicts.given)
    conflicts.add_metric(("after",), allocator.conflicts.conflicts)
    yield conflicts
    pushes = CounterMetricFamily(
        "kata_pin_alloc_pushes",
        "Cpusets sent between two calls of the runtime, by channel and outcome.",
        labels=("way", "outcome"),
    )
    for way in (NRI, CRI):
        pushes.add_metric((way, "done"), pusher.sent[way, True])
        pushes.add_metric((way, "failed"), pusher.sent[way, False])
    yield pushes
    refusals = CounterMetricFamily(
        "kata_pin_alloc_refusals",
        "Containers that did not get what they requested.",
        labels=("kind",),
    )
    for kind in RefusalKind:
        refusals.add_metric((kind.value,), allocator.news.refusals[kind])
    yield refusals
