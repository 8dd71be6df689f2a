"""The allocator as the state document (base/documents/pools.py) and metrics show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, Grant
from kata_pin.base.cpuset import union
from kata_pin.base.documents import pools
from kata_pin.base.values import CpuClass, RefusalKind
from kata_pin.engine.counters import MetricRow
from kata_pin.options.allocation.allocator import Allocator
from kata_pin.options.allocation.ledger import Ledger, cpuset_for
from kata_pin.options.allocation.push import CRI, NRI, Pusher
from kata_pin.options.allocation.shared_pool import pools_of
from kata_pin.peers.nri.replies import Cpuset
from kata_pin.placement.masks import sandbox_of
from kata_pin.service.sandbox_document import cpus, notes


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
        policy=allocator.settings.policy,
        suspended=allocator.suspended,
        guarantee=allocator.guarantee,
        pools=pools_of(state),
        held_back=str(allocator.grants.held_back),
        grants=tuple(_grant(one, state, pending, ledger) for one in state.grants.values()),
        holders=tuple(
            pools.Holder(one.container_id, one.pod, one.name, str(one.cpus), one.source, one.reason)
            for one in holders
        ),
        push=None if pusher is None else _push(pusher, ledger),
        refusals=allocator.news.refusals.total(),
        refused=tuple(allocator.news.refused),
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
