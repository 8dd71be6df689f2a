"""Our own allocator, which decides cpusets (`alloc.policy`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from kata_pin.base.allocation import Grant
from kata_pin.base.cpuset import CpuSet, union
from kata_pin.base.placement import Note, PassOutcome
from kata_pin.base.sandbox import Container
from kata_pin.base.values import CpuClass, RefusalKind
from kata_pin.engine.counters import MetricRow, Shown, readings
from kata_pin.options.allocation.adjustments import HostDevices
from kata_pin.options.allocation.allocator import Allocator
from kata_pin.options.allocation.checked_policy import make_policy
from kata_pin.options.allocation.coordinator import Coordinator
from kata_pin.options.allocation.grants import AllocStore, PendingPasses
from kata_pin.options.allocation.holders import Holders, MemoryHomes
from kata_pin.options.allocation.nri_decider import nri_decider, plugin_index
from kata_pin.options.allocation.placement_files import PlacementFiles
from kata_pin.options.allocation.push import CRI, NRI, Pusher, kept_cpusets
from kata_pin.options.allocation.report import allocation_report, granted, view
from kata_pin.placement.masks import Allotment, sandbox_of
from kata_pin.service.options import Core, Running, Serving


class StoredAllocation(Running):
    """What was decided, for a command without a daemon; decides nothing."""

    def __init__(self, core: Core, allocator: Allocator) -> None:
        self._core = core
        self._allocator = allocator

    def allot(self, containers: Sequence[Container]) -> Allotment:
        """Return the containers with the CPUs of their grants."""
        return view(self._allocator, containers)

    def granted(self, containers: Sequence[Container]) -> Allotment:
        """Return the same; decides nothing."""
        return granted(self._allocator, containers)

    def exclusive(self) -> CpuSet:
        """Return what containers have exclusively."""
        return union(one.exclusive for one in self._allocator.effective.grants.values())

    def state(self) -> Mapping[str, Any]:
        """Return pools and grants."""
        return {"allocation": allocation_report(self._allocator)}

    async def give_back(self, ids: Collection[str] | None) -> Mapping[str, Any]:
        """Return whose cpuset is still kata-pin's: only a runtime can change it."""
        if ids is not None:
            return {}
        return {"cpusets_kept": kept_cpusets(self._allocator, self._core.registry)}


class Allocation(StoredAllocation):
    """The option at work in a daemon."""

    def __init__(self, core: Core, serving: Serving) -> None:
        """Raises StateError."""
        passes = PendingPasses(core.sandboxes)
        allocator = make_allocator(core, passes)
        super().__init__(core, allocator)
        self._guests = serving.guests
        config, plugin = core.live.now, serving.nri
        if plugin is not None:
            decider = nri_decider(serving.nri_intake, allocator, core.registry, passes)
            if decider is not None:
                plugin.listener = plugin.decider = decider
            plugin.index = plugin_index(allocator, config.nri.index)
        self._coordinator = Coordinator(
            allocator, passes, plugin, node=core.node, root=core.root, registry=core.registry
        )
        self._coordinator.catch_up()

    def passed(self, outcome: PassOutcome) -> None:
        """Let others have the CPUs that a sandbox left."""
        self._coordinator.passed(outcome)

    def ended(self, outcome: PassOutcome) -> None:
        """Release what a sandbox had."""
        self._coordinator.ended(outcome)

    async def before_deep_audit(self) -> None:
        """Ask the runtime about doubtful containers."""
        await self._coordinator.ask_runtime()

    def after_deep_audit(self) -> None:
        """Compare cgroups with the cpusets that were sent."""
        self._coordinator.audit()

    def tasks(self) -> Iterator[Coroutine[object, object, None]]:
        """Yield what follows overrides and annotations, and sends cpusets and placements."""
        yield self._coordinator.follow_orders()
        yield self._coordinator.follow_pods()
        yield self._coordinator.push()
        yield self._coordinator.write_placements(self._guest_cpus)

    def _guest_cpus(self, grant: Grant) -> CpuSet | None:
        return self._guests.cpus_of(sandbox_of(grant.request.pod), grant.container_id)

    def node_notes(self) -> Sequence[Note]:
        """Return why nothing is decided, for example."""
        return self._allocator.notes

    def state(self) -> Mapping[str, Any]:
        """Return pools, grants, and what is sent to the runtime."""
        coordinator = self._coordinator
        report = allocation_report(self._allocator, coordinator.problems, coordinator.pusher)
        return {"allocation": report}

    def metrics(self) -> Iterable[Shown]:
        """Return pools, pushes and refusals; nothing where nothing is decided."""
        return readings(METRICS, self._coordinator.pusher) if self._allocator.on else ()

    async def give_back(self, ids: Collection[str] | None) -> Mapping[str, Any]:
        """Restore all CPUs of containers; return those that still wait for that."""
        return {} if ids is not None else {"cpusets_kept": await self._coordinator.restore()}


def make_allocator(core: Core, passes: PendingPasses | None) -> Allocator:
    """Return the allocator; without `passes` it decides nothing. Raises StateError."""
    config = core.live.now
    return Allocator(
        config.alloc,
        core.node,
        AllocStore(core.registry),
        partial(make_policy, config.alloc),
        holders=Holders(core.registry),
        events=core.events,
        passes=passes,
        placements=PlacementFiles(config.runtime_dir, config.alloc),
        memory=None if passes is None else MemoryHomes(core.root, core.node, passes.vmm),
        devices=HostDevices(core.root, core.kata_pinning.hot_plug),
    )


def start(core: Core) -> StoredAllocation:
    """Return the option at work; raises StateError."""
    if core.serving is not None:
        return Allocation(core, core.serving)
    return StoredAllocation(core, make_allocator(core, None))


def _by_class(pusher: Pusher) -> Mapping[CpuClass, int]:
    """Return the number of containers by class."""
    found = Counter(grant.cpu_class for grant in pusher.allocator.grants.containers())
    return {cpu_class: found[cpu_class] for cpu_class in CpuClass}


_POOLS: Final = ("exclusive", "shared", "reserved", "housekeeping", "taken")

METRICS: Final[tuple[MetricRow[Pusher], ...]] = (
    MetricRow(
        "kata_pin_alloc_deciding",
        "Whether kata-pin decides cpusets now (0: suspended).",
        lambda pusher: int(pusher.allocator.decides),
    ),
    MetricRow(
        "kata_pin_alloc_cpus",
        "pCPUs by pool.",
        lambda pusher: {pool: len(getattr(pusher.allocator.state, pool)) for pool in _POOLS},
        {"pool": _POOLS},
        "`taken` are exclusive to containers that others gave them.",
    ),
    MetricRow(
        "kata_pin_alloc_containers",
        "Containers by class.",
        _by_class,
        {"class": CpuClass},
    ),
    MetricRow(
        "kata_pin_alloc_pending",
        "Containers whose newest cpuset is not applied yet.",
        lambda pusher: len(pusher.allocator.ledger.pending(pusher.allocator.effective)),
    ),
    MetricRow(
        "kata_pin_alloc_rival_pods",
        "Pods that show another NRI plugin that sets cpusets, asked before kata-pin or after it.",
        lambda pusher: {
            "before": pusher.allocator.conflicts.given,
            "after": pusher.allocator.conflicts.conflicts,
        },
        {"asked": ("before", "after")},
        "Those of the last ten minutes ([nri.md](nri.md)).",
    ),
    MetricRow(
        "kata_pin_alloc_pushes_total",
        "Cpusets sent between two calls of the runtime, by channel and outcome.",
        lambda pusher: {
            (way, outcome): pusher.sent[way, outcome == "done"]
            for way in (NRI, CRI)
            for outcome in ("done", "failed")
        },
        {"way": (NRI, CRI), "outcome": ("done", "failed")},
        "A failed one is sent again.",
    ),
    MetricRow(
        "kata_pin_alloc_refusals_total",
        "Containers that did not get what they requested.",
        lambda pusher: {kind: pusher.allocator.news.refusals[kind] for kind in RefusalKind},
        {"kind": RefusalKind},
    ),
)
