"""What a pass over one sandbox asks the allocator (engine.py): its containers with their CPUs.

A pass also admits containers that no event reported and releases stopped ones, so that hooks alone
are enough for sandboxes. Nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.requests import request_of_record
from kata_pin.model.alloc import ContainerRequest, Guarantee
from kata_pin.model.sandbox import Container, ContainerKind
from kata_pin.policy.alloc.allotment import Allotment, allot, nothing_allotted


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
