"""The allocator in the state document, and what a pass over one sandbox asks it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, ContainerRequest
from kata_pin.base.allocation import Grant as Granted
from kata_pin.base.cpuset import union
from kata_pin.base.documents.pools import (
    AddedDevice,
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
from kata_pin.base.sandbox import Container
from kata_pin.base.values import ContainerKind, Guarantee
from kata_pin.options.allocation.allocator import Allocator
from kata_pin.options.allocation.ledger import Ledger, cpuset_for
from kata_pin.options.allocation.push import Pusher
from kata_pin.options.allocation.requests import request_of_record
from kata_pin.peers.nri.replies import Cpuset
from kata_pin.placement.masks import Allotment, allot, nothing_allotted, sandbox_of
from kata_pin.service.sandbox_document import cpus, notes

# Our own allocator as the state document shows it (base/documents/pools.py).


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
        guarantee=allocator.guarantee,
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
    grant: Granted, state: AllocState, pending: Mapping[str, Cpuset], ledger: Ledger
) -> Grant:
    request, pod = grant.request, grant.request.pod
    own = cpuset_for(grant, state) if ledger.knows(grant.container_id) else Cpuset()
    waits = pending.get(grant.container_id)
    return Grant(
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
        devices=tuple(
            AddedDevice(one.path, one.kind, one.major, one.minor, f"{one.mode:o}", one.access)
            for one in creation.devices
        ),
        annotations=tuple(Variable(name, value) for name, value in creation.annotations),
    )


def _push(pusher: Pusher, ledger: Ledger) -> Push:
    return Push(
        channel=pusher.channel.name,
        reason=pusher.channel.problem,
        problem=pusher.problem,
        failures=tuple(PushFailure(one, why) for one, why in ledger.problems.items()),
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
