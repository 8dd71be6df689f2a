"""Metrics of exclusive pCPUs: what the watch counted, who may run there, interrupts."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kata_pin.daemon.isolation.claims import Claims
from kata_pin.daemon.isolation.watch import Watch
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.errors import HostError, ParseError, reason_of
from kata_pin.host.files import read_bytes
from kata_pin.host.process import ProcessIndex
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import get_affinity
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.windows import TaskClass, Verdict
from kata_pin.policy.isolation.classes import FOREIGN
from kata_pin.sources.nri import NriPlugin
from kata_pin.wire.kernel.interrupts import MAX_TEXT, parse_interrupts

log = logging.getLogger(__name__)

PROCESSES: Final = 256
"""Processes whose affinity is asked for between two chances for the event loop to serve others."""

Late = Callable[[], Iterable[Metric]]
"""Makes families beside the event loop: what it reads takes long on a node with many pCPUs."""


@dataclass(frozen=True)
class IsolationMetrics:
    """Makes them; `index` has the node's processes as of the last audit or event."""

    root: HostRoot
    sandboxes: Sandboxes
    claims: Claims
    watch: Watch
    index: ProcessIndex
    nri: NriPlugin | None

    def families(self) -> Iterator[Metric | Late]:
        """Yield what the watch counted since the daemon's start, and connections."""
        if self.nri is not None and (self.nri.wanted or self.nri.runtime):  # else there is none
            yield GaugeMetricFamily(
                "kata_pin_nri_connected",
                "Whether the container runtime's NRI is connected.",
                int(self.nri.connected_at is not None),
            )
        cpus = self.claims.exclusive()
        if self.watch.is_on:  # else nobody knows: 0 would say that nobody ran there
            yield from self._watched(cpus)
        yield partial(self._interrupts, cpus)

    def _watched(self, cpus: CpuSet) -> Iterator[Metric]:
        """Yield what the watch counted."""
        watch = self.watch
        yield _by_cpu(
            "kata_pin_vcpu_run_seconds",
            "Time that vCPUs with an exclusive pCPU ran, by pCPU.",
            watch.ran_ns,
            cpus,
        )
        yield _by_cpu(
            "kata_pin_vcpu_wait_seconds",
            "Time that vCPUs with an exclusive pCPU were ready and waited for it, by pCPU.",
            watch.waited_ns,
            cpus,
        )
        yield _by_class(
            "kata_pin_foreign_seconds",
            "Time of others' tasks on exclusive pCPUs in the windows that were recorded.",
            watch.foreign_ns,
            cpus,
            1e9,
        )
        yield _by_class(
            "kata_pin_foreign_switches",
            "Times that others' tasks got an exclusive pCPU in the windows that were recorded.",
            watch.foreign_slices,
            cpus,
        )
        windows = CounterMetricFamily(
            "kata_pin_windows",
            "Windows of exclusive pCPUs that were recorded, by verdict.",
            labels=("verdict",),
        )
        for verdict in Verdict:
            windows.add_metric((verdict.value,), watch.windows[verdict])
        yield windows

    async def violations(self) -> dict[str, int]:
        """Return how many pCPUs others run on, if watched, and how many processes of others may."""
        lasting = {
            one.watched.cpu for one in self.watch.sights.values() if one.episode_at is not None
        }
        foreign = {"foreign": len(lasting)} if self.watch.is_on else {}
        return {**foreign, "intruder": await self._intruders()}

    async def _intruders(self) -> int:
        """Count the processes of no sandbox whose main thread may run on an exclusive pCPU."""
        exclusive, found = self.claims.exclusive(), 0
        if not exclusive:
            return 0
        for number, process in enumerate(self.index.all(), start=1):
            if number % PROCESSES == 0:
                await asyncio.sleep(0)
            if not process.kernel and process.pid not in self.sandboxes.tracked:
                with suppress(HostError):  # it ended
                    found += not get_affinity(process.pid, self.root).isdisjoint(exclusive)
        return found

    def _interrupts(self, cpus: CpuSet) -> Iterator[Metric]:
        """Yield the interrupts of exclusive pCPUs since boot."""
        family = CounterMetricFamily(
            "kata_pin_interrupts",
            "Interrupts that exclusive pCPUs handled since boot, by what they are for.",
            labels=("cpu", "kind"),
        )
        if cpus:
            try:
                data = read_bytes(self.root.proc("interrupts"), MAX_TEXT)
                for cpu, counts in parse_interrupts(data, cpus).items():
                    for kind, count in counts.items():
                        family.add_metric((str(cpu), kind.value), count)
            except (OSError, ParseError) as error:
                log.debug("no interrupts: %s", reason_of(error))
        yield family


def _by_cpu(name: str, about: str, times_ns: Counter[int], cpus: CpuSet) -> Metric:
    """Return seconds by pCPU, also of `cpus` that have none yet."""
    family = CounterMetricFamily(name, about, labels=("cpu",))
    for cpu in sorted({*times_ns, *cpus}):
        family.add_metric((str(cpu),), times_ns[cpu] / 1e9)
    return family


def _by_class(
    name: str,
    about: str,
    found: Counter[tuple[int, TaskClass]],
    cpus: CpuSet,
    unit: float = 1.0,
) -> Metric:
    """Return numbers by pCPU and class, also of `cpus` that have none yet."""
    family = CounterMetricFamily(name, about, labels=("cpu", "class"))
    for cpu in sorted({*cpus, *(cpu for cpu, _ in found)}):
        for kind in sorted(FOREIGN):
            family.add_metric((str(cpu), kind.value), found[cpu, kind] / unit)
    return family
