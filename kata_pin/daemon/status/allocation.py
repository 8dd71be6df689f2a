"""Our own allocator as the state document shows it (model/reports/pools.py). Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.ledger import Ledger, cpuset_for
from kata_pin.daemon.allocation.push import Pusher
from kata_pin.daemon.status.sandbox import cpus, notes
from kata_pin.model.alloc import AllocState
from kata_pin.model.alloc import Grant as Granted
from kata_pin.model.cpuset import union
from kata_pin.model.reports.pools import (
    Adjustment,
    Allocation,
    Grant,
    Holder,
    Hugepages,
    Mount,
    Pools,
    Push,
    PushFailure,
    RefusedRequest,
    Variable,
)
from kata_pin.policy.alloc.allotment import sandbox_of
from kata_pin.wire.nri.replies import Cpuset


def allocation_report(
    allocator: Allocator, problems: Sequence[str] = (), pusher: Pusher | None = None
) -> Allocation | None:
    """Return the report, None if the configuration wants no allocator.

    `pusher` is None without a daemon: then nothing is known of what was sent to runtimes.
    """
    if not allocator.on:
        return None
    holders, ledger = allocator.holders, allocator.ledger
    state = replace(allocator.state, taken=union(one.cpus for one in holders))
    pending = ledger.pending(allocator.effective)
    return Allocation(
        policy=allocator.policy_name,
        suspended=allocator.suspended,
        guarantee=allocator.guarantee.value,
        pools=Pools(
            reserved=str(state.reserved),
            housekeeping=str(state.housekeeping),
            shared=str(state.shared),
            exclusive=str(state.exclusive),
            taken=str(state.taken),
        ),
        held_back=str(allocator.grants.held_back),
        grants=tuple(_grant(one, state, pending, ledger) for one in state.grants.values()),
        holders=tuple(
            Holder(one.container_id, one.pod, one.name, str(one.cpus), one.source, one.reason)
            for one in holders
        ),
        push=None if pusher is None else _push(pusher, ledger),
        refusals=allocator.news.refusals.total(),
        refused=tuple(
            RefusedRequest(
                time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one.at)),
                id=one.container_id,
                container=one.title,
                kind=one.refusal.kind.value,
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
    grant: Granted, state: AllocState, pending: Mapping[str, Cpuset], ledger: Ledger
) -> Grant:
    request, pod = grant.request, grant.request.pod
    own = cpuset_for(grant, state) if ledger.knows(grant.container_id) else Cpuset()
    waits = pending.get(grant.container_id)
    return Grant(
        id=grant.container_id,
        kind=grant.kind.value,
        name=request.name,
        pod=pod.title,
        pod_uid=pod.pod_uid,
        sandbox=sandbox_of(pod),
        kata=pod.kata,
        cpu_class=grant.cpu_class.value,
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


def _adjustment(grant: Granted) -> Adjustment | None:
    limits, creation = grant.limits, grant.creation
    if not limits and not creation:
        return None
    return Adjustment(
        shares=limits.shares,
        quota_us=limits.quota_us,
        period_us=limits.period_us,
        memory=limits.memory,
        hugepages=tuple(Hugepages(size, limit) for size, limit in creation.hugepages),
        rdt_class=creation.rdt_class,
        blockio_class=creation.blockio_class,
        env=tuple(Variable(name, value) for name, value in creation.env),
        mounts=tuple(Mount(one.destination, one.source) for one in creation.mounts),
    )


def _push(pusher: Pusher, ledger: Ledger) -> Push:
    return Push(
        channel=pusher.channel.name,
        reason=pusher.channel.problem,
        problem=pusher.problem,
        failures=tuple(PushFailure(one, why) for one, why in ledger.problems.items()),
    )
