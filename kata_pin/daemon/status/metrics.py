"""Metrics in Prometheus' text form, made when somebody asks for them.

Names and labels are a contract with dashboards (docs/metrics.md). Labels have few values: no tid,
no container id, no pod; sandboxes have series of their own only where the setting
metrics.sandboxes allows some. The registry is our own, so what a library registers in the global
one is never shown. Out of scope: counting (counters.py), and who is answered (scrape.py).

Lifetime: the daemon's. What a report says of threads is summed up once a report.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from kata_pin import __version__
from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.push import CRI, NRI, Pusher
from kata_pin.daemon.reconcile.counters import NO_ERRNO, Counters, Histogram
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.status.isolation_metrics import IsolationMetrics, Late
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.history import History
from kata_pin.daemon.store.pins import Pins
from kata_pin.model.alloc import RefusalKind
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.pass_outcome import thread_states
from kata_pin.model.placement import Report
from kata_pin.model.reports.history import NodeEventKind
from kata_pin.model.sandbox import Sandbox
from kata_pin.model.settings import CpuClass

YIELD_EVERY: Final = 16
"""Sandboxes between two chances for the event loop to serve a hook."""

MAX_LABEL: Final = 320
"""Longest label value: a namespace, a slash and a pod's name have at most 317 characters."""

VIOLATIONS: Final = (
    *("drift", "foreign", "conflict", "intruder", "no-vmm", "unpinned", "orphan"),
    "other-writer",
)

Counted = Counter[tuple[str, str]]
"""Threads by role and state."""


class Metrics:
    """Makes the text; one at a time."""

    def __init__(
        self,
        counters: Counters,
        sandboxes: Sandboxes,
        history: History,
        online: Callable[[], CpuSet],
        *,
        registry: Registry,
        pins: Pins,
        overruns: Callable[[], int],
        locked: Callable[[], int],
        single: int,
        events: Mapping[NodeEventKind, int],
        refused: Callable[[], bool],
        isolation: IsolationMetrics,
        more: Callable[[], Iterable[Metric]] = tuple,
    ) -> None:
        """`online` are the node's pCPUs, `overruns` those of file events.

        So many sandboxes at most get series of their own. `events` counts those of the node;
        `locked` is the number of processes whose memory is locked, `refused` whether the newest
        configuration was. `more` are the families of others.
        """
        self._counters = counters
        self._sandboxes = sandboxes
        self._registry = registry
        self._pins = pins
        self._history = history
        self._online = online
        self._overruns = overruns
        self._locked = locked
        self._single = single
        self._events = events
        self._refused = refused
        self._isolation = isolation
        self._more = more
        self._known: dict[str, tuple[Report, bool, Counted]] = {}
        self._turn = asyncio.Lock()

    async def text(self) -> bytes:
        """Return the exposition; rendered beside the event loop."""
        async with self._turn:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(_Collected(await self._families()))
            return await asyncio.to_thread(generate_latest, registry)

    async def _families(self) -> list[Metric | Late]:
        await self._count()
        violations = self._violations(await self._isolation.violations())
        families: list[Metric | Late] = [*self._node(), violations, *self._deeds(), *self._more()]
        families += self._isolation.families()
        if self._single:
            families.append(self._sandbox_threads())
        return families

    async def _count(self) -> None:
        """Sum up the threads of sandboxes that have a new report."""
        known: dict[str, tuple[Report, bool, Counted]] = {}
        all_released = self._pins.released()
        for number, sandbox_id in enumerate(self._sandboxes.ids, start=1):
            cache = self._sandboxes.cache(sandbox_id)
            if cache is not None and cache.report is not None:
                released = sandbox_id in all_released
                old = self._known.get(sandbox_id)
                if old is None or old[0] is not cache.report or old[1] != released:
                    old = cache.report, released, _counted(cache.report, released=released)
                known[sandbox_id] = old
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        self._known = known

    def _node(self) -> Iterator[Metric]:
        """Yield what is now."""
        yield GaugeMetricFamily("kata_pin_sandboxes", "Known sandboxes.", len(self._sandboxes.ids))
        yield GaugeMetricFamily(
            "kata_pin_locked_processes",
            "Processes whose memory is locked, so that their command lines cannot be read.",
            self._locked(),
        )
        threads = GaugeMetricFamily(
            "kata_pin_threads", "Threads of sandboxes by role and state.", labels=("role", "state")
        )
        total: Counted = Counter()
        claims: Counter[int] = Counter()
        for report, _, counted in self._known.values():
            total.update(counted)
            if report.placement is not None:
                claims.update(report.placement.mask.exclusive)
        for labels, count in sorted(total.items()):
            threads.add_metric(labels, count)
        yield threads
        claimed = GaugeMetricFamily(
            "kata_pin_cpu_claims",
            "Sandboxes to which a pCPU is exclusive; more than 1 is a conflict.",
            labels=("cpu",),
        )
        for cpu in self._online():
            claimed.add_metric((str(cpu),), claims[cpu])
        yield claimed
        yield GaugeMetricFamily(
            "kata_pin_config_refused",
            "Whether the newest reload was refused (1: the former configuration is in force).",
            int(self._refused()),
        )
        yield InfoMetricFamily(
            "kata_pin_build",
            "Version of the daemon and of Python.",
            {"version": __version__, "python": platform.python_version()},
        )

    def _violations(self, others: Mapping[str, int]) -> Metric:
        """Return how much is not as it should be, by the kinds of findings of `check`."""
        found = Counter(others)
        claims: Counter[int] = Counter()
        now = time.monotonic()
        for sandbox_id, (report, _, counted) in self._known.items():
            cache, placement = self._sandboxes.cache(sandbox_id), report.placement
            found["drift"] += sum(n for (_, state), n in counted.items() if state == "drift")
            if cache is None or cache.vmm is None:
                found["no-vmm"] += 1
            elif placement is not None:
                found["unpinned"] += placement.mask.mask is None
                found["orphan"] += cache.vmm.orphan
                found["other-writer"] += bool(cache.other_writers.backed_off(now))
                claims.update(placement.mask.exclusive)
        found["conflict"] = sum(1 for count in claims.values() if count > 1)
        family = GaugeMetricFamily(
            "kata_pin_violations",
            "What is not as it should be, by the kind of finding in check.",
            labels=("kind",),
        )
        unknown = {"foreign"} - others.keys()
        for kind in VIOLATIONS:
            if kind not in unknown:
                family.add_metric((kind,), found[kind])
        return family

    def _deeds(self) -> Iterator[Metric]:
        """Yield what was done since the start."""
        counters = self._counters
        yield _histogram(
            "kata_pin_apply_seconds", "Duration of passes that set affinities.", counters.apply
        )
        yield _histogram(
            "kata_pin_hook_seconds",
            "Time from a hook's start to its last answer.",
            counters.hooks,
        )
        drifts = CounterMetricFamily(
            "kata_pin_drift",
            "Threads that something moved off their expected affinity, by class of drift.",
            labels=("reason",),
        )
        changes = CounterMetricFamily(
            "kata_pin_thread_changes",
            "Threads that passes placed for the first time or elsewhere, or that ended meanwhile.",
            labels=("reason",),
        )
        for kind, count in sorted(counters.drifts.items()):
            (changes if kind.expected else drifts).add_metric((kind.value,), count)
        yield drifts
        yield changes
        errors = CounterMetricFamily(
            "kata_pin_errors", "Failed operations.", labels=("op", "errno")
        )
        counted = counters.errors + Counter({("history", NO_ERRNO): self._history.failures})
        for labels, count in sorted(counted.items()):
            errors.add_metric(labels, count)
        yield errors
        events = CounterMetricFamily(
            "kata_pin_node_events",
            "Events of the node as a whole, by kind.",
            labels=("kind",),
        )
        for event in NodeEventKind:
            events.add_metric((event.value,), self._events.get(event, 0))
        yield events
        yield CounterMetricFamily(
            "kata_pin_event_overruns",
            "Number of times that the kernel dropped events because the daemon was too slow.",
            counters.overruns + self._overruns(),
        )
        if counters.audited_at is not None:
            yield GaugeMetricFamily(
                "kata_pin_last_audit_timestamp_seconds",
                "End of the last audit, in Unix time.",
                counters.audited_at,
            )

    def _sandbox_threads(self) -> Metric:
        """Return threads by sandbox, of the first so many sandboxes in the order of ids."""
        family = GaugeMetricFamily(
            "kata_pin_sandbox_threads",
            "Threads per sandbox by state.",
            labels=("sandbox", "pod", "state"),
        )
        for sandbox_id in sorted(self._known)[: self._single]:
            sandbox = Sandbox(sandbox_id, self._registry.containers(sandbox_id), None)
            states: Counter[str] = Counter()
            for (_, state), count in self._known[sandbox.id][2].items():
                states[state] += count
            for state, count in sorted(states.items()):
                labels = sandbox.id[:MAX_LABEL], sandbox.pod[:MAX_LABEL], state
                family.add_metric(labels, count)
        return family


class _Collected:
    """What was gathered, as the library's registry takes it."""

    def __init__(self, families: Iterable[Metric | Late]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Yield the families."""
        for one in self._families:
            yield from (one,) if isinstance(one, Metric) else one()


def _counted(report: Report, *, released: bool) -> Counted:
    return Counter(
        (thread.role.role.value, state)
        for thread, state in thread_states(report, released=released)
    )


def _histogram(name: str, about: str, found: Histogram) -> Metric:
    return HistogramMetricFamily(name, about, list(found.cumulative()), found.sum)


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
    for pool in ("exclusive", "shared", "reserved", "housekeeping", "taken"):
        cpus.add_metric((pool,), len(getattr(state, pool)))
    yield cpus
    containers = GaugeMetricFamily(
        "kata_pin_alloc_containers", "Containers by class.", labels=("class",)
    )
    found = Counter(grant.cpu_class for grant in allocator.grants.containers())
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
