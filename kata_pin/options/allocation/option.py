"""Our own allocator, which decides cpusets (`alloc.policy`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, ContainerRequest, Grant
from kata_pin.base.cpuset import CpuSet, union
from kata_pin.base.documents import pools
from kata_pin.base.placement import Note, PassOutcome
from kata_pin.base.sandbox import Container
from kata_pin.base.values import ContainerKind, CpuClass, Guarantee, RefusalKind
from kata_pin.engine.counters import MetricRow, Shown, readings
from kata_pin.options.allocation.adjustments import HostDevices
from kata_pin.options.allocation.allocator import Allocator
from kata_pin.options.allocation.checked_policy import make_policy
from kata_pin.options.allocation.coordinator import Coordinator
from kata_pin.options.allocation.grants import AllocStore, PendingPasses
from kata_pin.options.allocation.holders import Holders, MemoryHomes
from kata_pin.options.allocation.ledger import Ledger, cpuset_for
from kata_pin.options.allocation.nri_decider import nri_decider, plugin_index
from kata_pin.options.allocation.placement_files import PlacementFiles
from kata_pin.options.allocation.push import CRI, NRI, Pusher, kept_cpusets
from kata_pin.options.allocation.requests import request_of_record
from kata_pin.peers.nri.replies import Cpuset
from kata_pin.placement.masks import Allotment, allot, nothing_allotted, sandbox_of
from kata_pin.service.options import Core, Running, Serving
from kata_pin.service.sandbox_document import cpus, notes

# The allocator as the state document shows it (base/documents/pools.py), and what a pass asks it.


def allocation_report(
    allocator: Allocator, problems: Sequence[str] = (), pusher: Pusher | None = None
) -> pools.Allocation | None:
    """Return the report, None if the configuration wants no allocator.

    `pusher` is None without a daemon: then nothing is known of what was sent to runtimes.
    """
    if not allocator.on:
        return None
    holders, ledger = allocator.holders, allocator.ledger
    state = replace(allocator.state, taken=union(one.cpus for one in holders))
    pending = ledger.pending(allocator.effective)
    return pools.Allocation(
        policy=allocator.policy_name,
        suspended=allocator.suspended,
        guarantee=allocator.guarantee,
        pools=pools.Pools(
            reserved=str(state.reserved),
            housekeeping=str(state.housekeeping),
            shared=str(state.shared),
            exclusive=str(state.exclusive),
            taken=str(state.taken),
        ),
        held_back=str(allocator.grants.held_back),
        grants=tuple(_grant(one, state, pending, ledger) for one in state.grants.values()),
        holders=tuple(
            pools.Holder(one.container_id, one.pod, one.name, str(one.cpus), one.source, one.reason)
            for one in holders
        ),
        push=None if pusher is None else _push(pusher, ledger),
        refusals=allocator.news.refusals.total(),
        refused=tuple(
            pools.RefusedRequest(
                time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one.at)),
                id=one.container_id,
                container=one.title,
                kind=one.refusal.kind,
                message=one.refusal.message,
                strict=one.refusal.strict,
                pod=one.pod,
                pod_uid=one.pod_uid,
            )
            for one in allocator.news.refused
        ),
        problems=tuple(problems),
        notes=notes(allocator.notes),
    )


def _grant(
    grant: Grant, state: AllocState, pending: Mapping[str, Cpuset], ledger: Ledger
) -> pools.Grant:
    request, pod = grant.request, grant.request.pod
    own = cpuset_for(grant, state) if ledger.knows(grant.container_id) else Cpuset()
    waits = pending.get(grant.container_id)
    return pools.Grant(
        id=grant.container_id,
        kind=grant.kind,
        name=request.name,
        pod=pod.title,
        pod_uid=pod.pod_uid,
        sandbox=sandbox_of(pod),
        kata=pod.kata,
        cpu_class=grant.cpu_class,
        policy=grant.policy,
        cpus=str(grant.cpus),
        exclusive=str(grant.exclusive),
        shared=cpus(grant.shared),
        mems=str(grant.mems),
        millis=request.cpu_millis,
        ended=bool(request.ended_in),
        override=None if pod.ordered is None else pod.ordered.value,
        cpuset=str(own.cpus),
        pending=None if waits is None else str(waits.cpus or own.cpus),
        adjustment=_adjustment(grant),
        reasons=tuple(grant.reasons),
    )


def _adjustment(grant: Grant) -> pools.Adjustment | None:
    limits, creation = grant.limits, grant.creation
    if not limits and not creation:
        return None
    return pools.Adjustment(
        shares=limits.shares,
        quota_us=limits.quota_us,
        period_us=limits.period_us,
        memory=limits.memory,
        hugepages=tuple(pools.Hugepages(size, limit) for size, limit in creation.hugepages),
        rdt_class=creation.rdt_class,
        blockio_class=creation.blockio_class,
        env=tuple(pools.Variable(name, value) for name, value in creation.env),
        mounts=tuple(pools.Mount(one.destination, one.source) for one in creation.mounts),
        devices=tuple(
            pools.AddedDevice(one.path, one.kind, one.major, one.minor, f"{one.mode:o}", one.access)
            for one in creation.devices
        ),
        annotations=tuple(pools.Variable(name, value) for name, value in creation.annotations),
    )


def _push(pusher: Pusher, ledger: Ledger) -> pools.Push:
    return pools.Push(
        channel=pusher.channel.name,
        reason=pusher.channel.problem,
        problem=pusher.problem,
        failures=tuple(pools.PushFailure(one, why) for one, why in ledger.problems.items()),
    )


# What a pass over one sandbox asks the allocator (engine/passes.py): its containers with their
# CPUs.
#
# A pass also admits containers that no event reported and releases stopped ones, so that hooks
# alone are enough for sandboxes. Nothing is kept here.


def view(allocator: Allocator, containers: Sequence[Container]) -> Allotment:
    """Return what the grants mean for recorded containers, after they were brought up to date."""
    if not allocator.on:
        return nothing_allotted(containers)
    if allocator.at_work:
        allocator.follow_host(containers)
        if allocator.decides:
            _settle(allocator, containers)
    else:
        allocator.follow_holders(containers)
    return granted(allocator, containers)


def granted(allocator: Allocator, containers: Sequence[Container]) -> Allotment:
    """Return what the grants made so far mean for recorded containers; decides nothing."""
    return allot(containers, allocator.now) if allocator.decides else nothing_allotted(containers)


def _settle(allocator: Allocator, containers: Sequence[Container]) -> None:
    for one in containers:
        if not one.state.counts:
            allocator.ended([one.id], one.sandbox_id, "its container has stopped")
    running = [
        one for one in containers if one.kind is ContainerKind.CONTAINER and one.state.counts
    ]
    newest = {(one.pod_uid, one.name): one.id for one in running if one.name}
    for one in running:
        if newest.get((one.pod_uid, one.name), one.id) != one.id:
            continue  # a former instance, whose grant the newest has
        request = allocator.newest(request_of_record(one), one.sandbox_id)
        grant = allocator.state.get(one.id)
        if grant is None:
            if one.cpus is None:
                allocator.change(request, "it runs already")
        elif allocator.guarantee is not Guarantee.NODE:  # else the runtime reports changes itself
            _follow_record(allocator, grant.request, request)


def _follow_record(
    allocator: Allocator, known: ContainerRequest, recorded: ContainerRequest
) -> None:
    """Follow a record that has changed: a later source may know names and sizes."""
    if recorded.cpu_millis == 0 and recorded.quota_us is None:
        recorded = replace(
            recorded,
            cpu_millis=known.cpu_millis,
            quota_us=known.quota_us,
            period_us=known.period_us,
        )
    if recorded != known:
        allocator.change(recorded, "its record")


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
