"""The watch: whether others ran on exclusive pCPUs, and who (`isolation.watch`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from kata_pin.base.documents.measured import WatchDocument
from kata_pin.base.sandbox import ThreadKey
from kata_pin.base.values import TaskClass, Verdict
from kata_pin.engine.counters import MetricRow, Shown, readings
from kata_pin.options.isolation.watch import Watch
from kata_pin.placement.owners import FOREIGN
from kata_pin.service.options import Core, Running, Serving


class Isolation(Running):
    """The option at work; it restores nothing."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    async def look(self) -> None:
        """Compare the counters of exclusive pCPUs with those of the last audit."""
        await self._watch.look()

    def verbs(self) -> Mapping[str, Callable[[], WatchDocument]]:
        """Answer `watch`."""
        return {"watch": self._watch.report}

    def thread(self, key: ThreadKey) -> Mapping[str, Any]:
        """Return for how long a watched vCPU was not moved."""
        unmoved_s = self._watch.unmoved_s(key)
        return {} if unmoved_s is None else {"unmoved_s": round(unmoved_s, 3)}

    def violations(self) -> Mapping[str, int]:
        """Return on how many pCPUs others run; nothing if nobody looks."""
        sights = self._watch.sights.values()
        lasting = {one.watched.cpu for one in sights if one.episode is not None}
        return {"foreign": len(lasting)} if self._watch.is_on else {}

    def metrics(self) -> Iterable[Shown]:
        """Return what was counted; nothing if nobody looks: 0 would say that nobody ran there."""
        return readings(METRICS, self._watch) if self._watch.is_on else ()


def start(core: Core) -> Running:
    """Return the option at work; without a daemon there is nothing to watch."""
    return Running() if core.serving is None else _watching(core, core.serving)


def _watching(core: Core, serving: Serving) -> Isolation:
    return Isolation(
        Watch(
            core.root,
            core.owners,
            core.live,
            core.events,
            serving.start,
            lambda: (
                core.node.last.topology.online - core.node.last.assigned - core.options.exclusive()
            ),
        )
    )


def _seconds(times_ns: Mapping[int, int], watch: Watch) -> Mapping[str, float]:
    """Return seconds by pCPU, also of exclusive ones that have none yet."""
    cpus = sorted({*times_ns, *watch.owners.exclusive()})
    return {str(cpu): times_ns.get(cpu, 0) / 1e9 for cpu in cpus}


def _by_class(
    counts: Mapping[tuple[int, TaskClass], int], watch: Watch, unit: float = 1.0
) -> Mapping[tuple[str, str], float]:
    """Return numbers by pCPU and class, also of exclusive ones that have none yet."""
    cpus = sorted({*watch.owners.exclusive(), *(cpu for cpu, _ in counts)})
    return {
        (str(cpu), kind): counts.get((cpu, kind), 0) / unit
        for cpu in cpus
        for kind in sorted(FOREIGN)
    }


_BY_CLASS: Final = {"cpu": (), "class": sorted(FOREIGN)}

METRICS: Final[tuple[MetricRow[Watch], ...]] = (
    MetricRow(
        "kata_pin_vcpu_run_seconds_total",
        "Time that vCPUs with an exclusive pCPU ran, by pCPU.",
        lambda watch: _seconds(watch.ran_ns, watch),
        {"cpu": ()},
        "As of the last audit.",
    ),
    MetricRow(
        "kata_pin_vcpu_wait_seconds_total",
        "Time that vCPUs with an exclusive pCPU were ready and waited for it, by pCPU.",
        lambda watch: _seconds(watch.waited_ns, watch),
        {"cpu": ()},
        "The guest's steal time.",
    ),
    MetricRow(
        "kata_pin_foreign_seconds_total",
        "Time of others' tasks on exclusive pCPUs in the windows that were recorded.",
        lambda watch: _by_class(watch.foreign_ns, watch, 1e9),
        _BY_CLASS,
        "A window takes a second, and is recorded only after the counters showed others.",
    ),
    MetricRow(
        "kata_pin_foreign_switches_total",
        "Times that others' tasks got an exclusive pCPU in the windows that were recorded.",
        lambda watch: _by_class(watch.foreign_slices, watch),
        _BY_CLASS,
    ),
    MetricRow(
        "kata_pin_windows_total",
        "Windows of exclusive pCPUs that were recorded, by verdict.",
        lambda watch: {verdict: watch.windows[verdict] for verdict in Verdict},
        {"verdict": Verdict},
    ),
)
