"""Metrics of quiet pCPUs; none has a label per interrupt."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kata_pin.daemon.quiet.status import QuietStatus
from kata_pin.model.quiet.tunables import TunableKind


def quiet_metrics(status: QuietStatus) -> Iterator[Metric]:
    """Yield what the keeper's last round found; nothing while `quiet` is `off` or `report`."""
    if not status.acts:
        return
    state = status.state
    cpus = GaugeMetricFamily(
        "kata_pin_quiet_cpus",
        "Exclusive pCPUs that are kept quiet, by level; spared: those that cannot be.",
        labels=("level",),
    )
    cpus.add_metric(("irq",), len(state.quiet - state.full))
    cpus.add_metric(("full",), len(state.full))
    cpus.add_metric(("spared",), len(state.spared))
    yield cpus
    changed = GaugeMetricFamily(
        "kata_pin_quiet_values",
        "Masks and other values that are changed to keep pCPUs quiet, by kind.",
        labels=("kind",),
    )
    failed = CounterMetricFamily(
        "kata_pin_quiet_write_failures", "Failed writes of such values, by kind.", labels=("kind",)
    )
    for kind in TunableKind:
        changed.add_metric((kind.value,), status.held[kind])
        failed.add_metric((kind.value,), status.failed[kind])
    yield from (changed, failed)
    yield GaugeMetricFamily(
        "kata_pin_quiet_managed_interrupts",
        "Managed interrupts that may fire on quiet pCPUs: the kernel places them.",
        status.managed_on(state.quiet),
    )
    fired = CounterMetricFamily(
        "kata_pin_quiet_interrupts",
        "Interrupts of devices that fired on quiet pCPUs, by whether they can be moved.",
        labels=("kind",),
    )
    fired.add_metric(("movable",), status.movable_fired)
    fired.add_metric(("managed",), status.managed_fired)
    yield fired
