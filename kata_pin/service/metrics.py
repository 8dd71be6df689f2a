"""Metrics in Prometheus' text form, made when somebody asks for them.

Names and labels are a contract with dashboards (docs/metrics.md). Labels have few values: no tid,
no container id, no pod; sandboxes have series of their own only where the setting metrics.sandboxes
allows some. The registry is our own, so what a library registers in the global one is never shown.

Lifetime: the daemon's. What a report says of threads is summed up once a report.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kata_pin import __version__
from kata_pin.base.counters import InterruptKind
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.base.documents.check import FINDINGS, FOREIGN
from kata_pin.base.errors import HostError, ParseError, reason_of
from kata_pin.base.placement import DriftKind, Report, thread_states
from kata_pin.base.sandbox import Sandbox
from kata_pin.base.values import ThreadRole, ThreadState
from kata_pin.engine.counters import (
    NO_ERRNO,
    Counters,
    Histogram,
    MetricRow,
    Reading,
    Shown,
    readings,
)
from kata_pin.linux.files import HostRoot, read_bytes
from kata_pin.linux.interrupts import MAX_TEXT, parse_interrupts
from kata_pin.linux.tasks import get_affinity
from kata_pin.records.history import History
from kata_pin.service.options import Core

log = logging.getLogger(__name__)

YIELD_EVERY: Final = 16
"""Sandboxes between two chances for the event loop to serve a hook."""

MAX_LABEL: Final = 320
"""Longest label value: a namespace, a slash and a pod's name have at most 317 characters."""

VIOLATIONS: Final = tuple(row.kind for row in FINDINGS if row.counted)
"""The kinds of findings of `check` that are counted; options of other packages have more."""

PROCESSES: Final = 256
"""Processes whose affinity is asked for between two chances for the event loop to serve others."""

OPERATIONS: Final = ("sched_setaffinity", "pass", "hook", "spool", "audit", "history")
"""What is counted when it fails."""

Counted = Counter[tuple[str, str]]
"""Threads by role and state."""


@dataclass
class DaemonMetrics:
    """Makes the text, one at a time, and has the values of the core's metrics.

    `overruns` are those of file events; `refused`: whether the newest configuration was.
    """

    core: Core
    counters: Counters
    history: History
    overruns: Callable[[], int]
    refused: Callable[[], bool]
    _known: dict[str, tuple[Report, bool, Counted]] = field(default_factory=dict)
    _intruders: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def text(self) -> bytes:
        """Return the exposition; rendered beside the event loop."""
        async with self._turn:
            await self._count()
            self._intruders = await self._count_intruders()
            registry = CollectorRegistry(auto_describe=False)
            options = self.core.options.metrics(row.name for row in METRICS)
            registry.register(_Collected([*readings(METRICS, self), *options]))
            return await asyncio.to_thread(generate_latest, registry)

    async def _count(self) -> None:
        """Sum up the threads of sandboxes that have a new report."""
        known: dict[str, tuple[Report, bool, Counted]] = {}
        all_released = self.core.pins.released()
        for number, sandbox_id in enumerate(self.core.sandboxes.ids, start=1):
            cache = self.core.sandboxes.cache(sandbox_id)
            if cache is not None and cache.report is not None:
                released = sandbox_id in all_released
                old = self._known.get(sandbox_id)
                if old is None or old[0] is not cache.report or old[1] != released:
                    old = cache.report, released, _counted(cache.report, released=released)
                known[sandbox_id] = old
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        self._known = known

    async def _count_intruders(self) -> int:
        """Count the processes of no sandbox whose main thread may run on an exclusive pCPU.

        The node's processes are those of the last audit or event.
        """
        exclusive, count = self.core.owners.exclusive(), 0
        if not exclusive:
            return 0
        for number, process in enumerate(self.core.index.all(), start=1):
            if number % PROCESSES == 0:
                await asyncio.sleep(0)
            if not process.kernel and process.pid not in self.core.sandboxes.tracked:
                with suppress(HostError):  # it ended
                    affinity = get_affinity(process.pid, self.core.root)
                    count += not affinity.isdisjoint(exclusive)
        return count

    def threads(self) -> Counted:
        """Return the threads of all sandboxes."""
        total: Counted = Counter()
        for _, _, counted in self._known.values():
            total.update(counted)
        return Counter(dict(sorted(total.items())))

    def cpu_claims(self) -> Mapping[str, int]:
        """Return to how many sandboxes each online pCPU is exclusive."""
        claims: Counter[int] = Counter()
        for report, _, _ in self._known.values():
            if report.placement is not None:
                claims.update(report.placement.mask.exclusive)
        return {str(cpu): claims[cpu] for cpu in self.core.node.current().topology.online}

    def violations(self) -> Mapping[str, int]:
        """Return how much is not as it should be, by the kinds of findings of `check`."""
        others = self.core.options.violations()
        found = {**others, "intruder": self._intruders}
        found |= dict.fromkeys(("drift", "no-vmm", "unpinned", "orphan", "other-writer"), 0)
        claims: Counter[int] = Counter()
        now = time.monotonic()
        for sandbox_id, (report, _, counted) in self._known.items():
            cache, placement = self.core.sandboxes.cache(sandbox_id), report.placement
            found["drift"] += sum(n for (_, state), n in counted.items() if state == "drift")
            if cache is None or cache.vmm is None:
                found["no-vmm"] += 1
            elif placement is not None:
                found["unpinned"] += placement.mask.mask is None
                found["orphan"] += cache.vmm.orphan
                found["other-writer"] += bool(cache.other_writers.backed_off(now))
                claims.update(placement.mask.exclusive)
        found["conflict"] = sum(1 for count in claims.values() if count > 1)
        unknown = {FOREIGN.kind} - others.keys()
        return {kind: found[kind] for kind in (*VIOLATIONS, *others) if kind not in unknown}

    def drifts(self, *, expected: bool) -> Mapping[str, int]:
        """Return the threads that kata-pin moved, or that something else did."""
        return {
            kind: count
            for kind, count in sorted(self.counters.drifts.items())
            if kind.expected is expected
        }

    def errors(self) -> Mapping[tuple[str, str], int]:
        """Return failed operations by errno."""
        failures = Counter({("history", NO_ERRNO): self.history.failures})
        return dict(sorted((self.counters.errors + failures).items()))

    def nri_connected(self) -> int | None:
        """Return whether NRI is connected; None if this node has none."""
        nri = None if self.core.serving is None else self.core.serving.nri
        if nri is None or not (nri.wanted or nri.runtime):
            return None
        return int(nri.connected_at is not None)

    def sandbox_threads(self) -> Mapping[tuple[str, str, str], int] | None:
        """Return threads by sandbox, of the first `metrics.sandboxes` in the order of ids."""
        single = self.core.live.now.metrics.sandboxes
        if not single:
            return None
        found: dict[tuple[str, str, str], int] = {}
        for sandbox_id in sorted(self._known)[:single]:
            sandbox = Sandbox(sandbox_id, self.core.registry.containers(sandbox_id), None)
            states: Counter[str] = Counter()
            for (_, state), count in self._known[sandbox.id][2].items():
                states[state] += count
            for state, count in sorted(states.items()):
                found[sandbox.id[:MAX_LABEL], sandbox.pod[:MAX_LABEL], state] = count
        return found


def _counted(report: Report, *, released: bool) -> Counted:
    return Counter(
        (thread.role.role.value, state)
        for thread, state in thread_states(report, released=released)
    )


def _interrupts(root: HostRoot, cpus: CpuSet) -> Mapping[tuple[str, str], int]:
    """Return the interrupts of pCPUs since boot; reading takes long on a node with many."""
    if not cpus:
        return {}
    try:
        counts = parse_interrupts(read_bytes(root.proc("interrupts"), MAX_TEXT), cpus)
    except (OSError, ParseError) as error:
        log.debug("no interrupts: %s", reason_of(error))
        return {}
    return {
        (str(cpu), kind.value): count
        for cpu, kinds in counts.items()
        for kind, count in kinds.items()
    }


METRICS: Final[tuple[MetricRow[DaemonMetrics], ...]] = (
    MetricRow(
        "kata_pin_sandboxes",
        "Known sandboxes.",
        lambda now: len(now.core.sandboxes.ids),
    ),
    MetricRow(
        "kata_pin_locked_processes",
        "Processes whose memory is locked, so that their command lines cannot be read.",
        lambda now: now.core.survey.locked,
        more="A VMM on hung storage, or a hostile process. Such a VMM cannot be identified.",
    ),
    MetricRow(
        "kata_pin_bindings",
        "Sandboxes whose vCPUs are bound to pCPUs named by hand.",
        lambda now: len(now.core.pins.bindings()),
        more="See `kata-pin bind`.",
    ),
    MetricRow(
        "kata_pin_threads",
        "Threads of sandboxes by role and state.",
        DaemonMetrics.threads,
        {"role": ThreadRole, "state": get_args(ThreadState)},
    ),
    MetricRow(
        "kata_pin_cpu_claims",
        "Sandboxes to which a pCPU is exclusive; more than 1 is a conflict.",
        DaemonMetrics.cpu_claims,
        {"cpu": ()},
    ),
    MetricRow(
        "kata_pin_config_refused",
        "Whether the newest reload was refused (1: the former configuration is in force).",
        lambda now: int(now.refused()),
    ),
    MetricRow(
        "kata_pin_build_info",
        "Version of the daemon and of Python.",
        lambda _: {(__version__, platform.python_version()): 1},
        {"version": (), "python": ()},
    ),
    MetricRow(
        "kata_pin_violations",
        "What is not as it should be, by the kind of finding in check.",
        DaemonMetrics.violations,
        {"kind": ()},
        "; ".join(f"`{row.kind}`: {row.counted}" for row in FINDINGS if row.counted) + ".",
    ),
    MetricRow(
        "kata_pin_apply_seconds",
        "Duration of passes that set affinities.",
        lambda now: now.counters.apply,
        times=True,
    ),
    MetricRow(
        "kata_pin_hook_seconds",
        "Time from a hook's start to its last answer.",
        lambda now: now.counters.hooks,
        times=True,
    ),
    MetricRow(
        "kata_pin_drift_total",
        "Threads that something moved off their expected affinity, by class of drift.",
        lambda now: now.drifts(expected=False),
        {"reason": [kind for kind in DriftKind if not kind.expected]},
    ),
    MetricRow(
        "kata_pin_thread_changes_total",
        "Threads that passes placed for the first time or elsewhere, or that ended meanwhile.",
        lambda now: now.drifts(expected=True),
        {"reason": [kind for kind in DriftKind if kind.expected]},
        "That is not drift.",
    ),
    MetricRow(
        "kata_pin_errors_total",
        "Failed operations.",
        DaemonMetrics.errors,
        {"op": OPERATIONS, "errno": ()},
        f"`errno` is `{NO_ERRNO}` if there was none.",
    ),
    MetricRow(
        "kata_pin_node_events_total",
        "Events of the node as a whole, by kind.",
        lambda now: {kind: now.core.events.counts[kind] for kind in NodeEventKind},
        {"kind": NodeEventKind},
        "See [logs.md](logs.md).",
    ),
    MetricRow(
        "kata_pin_event_overruns_total",
        "Number of times that the kernel dropped events because the daemon was too slow.",
        lambda now: now.counters.overruns + now.overruns(),
    ),
    MetricRow(
        "kata_pin_last_audit_timestamp_seconds",
        "End of the last audit, in Unix time.",
        lambda now: now.counters.audited_at,
        more="Absent before the first.",
    ),
    MetricRow(
        "kata_pin_nri_connected",
        "Whether the container runtime's NRI is connected.",
        DaemonMetrics.nri_connected,
        more="Absent with `nri.enabled: no`, and with `auto` until it was connected once.",
    ),
    MetricRow(
        "kata_pin_interrupts_total",
        "Interrupts that exclusive pCPUs handled since boot, by what they are for.",
        lambda now: partial(_interrupts, now.core.root, now.core.owners.exclusive()),
        {"cpu": (), "kind": [kind.value for kind in InterruptKind]},
    ),
    MetricRow(
        "kata_pin_sandbox_threads",
        "Threads per sandbox by state.",
        DaemonMetrics.sandbox_threads,
        {"sandbox": (), "pod": (), "state": get_args(ThreadState)},
        "Only with `metrics.sandboxes`: the first ones by id.",
    ),
)


class _Collected:
    """What was read, as the library's registry takes it."""

    def __init__(self, shown: Iterable[Shown]) -> None:
        self._shown = shown

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        for row, value in self._shown:
            yield _family(row, value() if callable(value) else value)


def _family(row: MetricRow[Any], value: Reading) -> Metric:
    if isinstance(value, Histogram):
        return HistogramMetricFamily(row.name, row.help, list(value.cumulative()), value.sum)
    make = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    family = make(row.name, row.help, labels=tuple(row.labels))
    for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
        family.add_metric((labels,) if isinstance(labels, str) else labels, number)
    return family
