"""Containers that have a cpuset of ours get all CPUs back when our allocator is switched off.

NRI cannot take a cpuset away, it can only replace one by a longer list. What is ours: a cpuset that
this daemon gave or, if an earlier one did, one that is what was stored as given. Whatever else a
container has, somebody else decided.

Nothing is kept. Out of scope: sending (delivery.py, push.py), and the pins of Kata's threads.
"""

from __future__ import annotations

import logging

from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.delivery import Delivery, written
from kata_pin.daemon.status.documents import Json
from kata_pin.daemon.store.database import Registry
from kata_pin.model.alloc import AllocState, Grant
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.topology import HostTopology
from kata_pin.policy.alloc.refusals import other_owner
from kata_pin.wire.nri.replies import Cpuset

log = logging.getLogger(__name__)


def give_back(allocator: Allocator, delivery: Delivery, *, sure: bool = False) -> None:
    """Have containers given all CPUs, as soon as the runtime can be told.

    `sure`: this daemon has decided until now, so that whoever has a grant has a cpuset of ours.
    Under the kubelet's static policy nobody is: it sets every cpuset of the node anew.
    """
    state, node = allocator.state, allocator.node
    if other_owner(node.kubelet) is not None:
        return
    given = 0
    for grant in allocator.containers():
        ours, there = written(grant, state), delivery.there(grant.container_id)
        if ours and there.cpus and (sure or there.cpus == ours.cpus):
            cpuset = unconfined(state, node.topology, mems=bool(ours.mems))
            delivery.part(grant.container_id, cpuset)
            given += 1
    if given:
        log.info("allocator: switched off: %d containers are given all CPUs back", given)


def unconfined(state: AllocState, topology: HostTopology, *, mems: bool = False) -> Cpuset:
    """Return what a container can have at most: what nobody isolates, and what we gave out.

    Only what is online: cgroup v1 takes nothing else. With `mems` all memory nodes too.
    """
    ordinary = topology.online - topology.isolated
    given = state.cpus | state.reserved | state.housekeeping
    nodes = CpuSet(topology.nodes) if mems else EMPTY
    return Cpuset((ordinary | given) & topology.online, nodes)


def kept(allocator: Allocator, delivery: Delivery, registry: Registry) -> list[Json]:
    """Return the containers that still have a cpuset of ours, as plain JSON values.

    Of one that no runtime has told of now, its record says what it has, if it is Kata's; others are
    known because a runtime has told of them.
    """
    state = allocator.state
    return [
        {
            "id": grant.container_id,
            "pod": grant.request.pod.title,
            "name": grant.request.name,
            "cpus": str(written(grant, state).cpus),
        }
        for grant in allocator.containers()
        if written(grant, state) and _keeps(grant, state, delivery, registry)
    ]


def _keeps(grant: Grant, state: AllocState, delivery: Delivery, registry: Registry) -> bool:
    name = grant.container_id
    if delivery.knows(name):
        return delivery.parts(name)
    if not grant.request.pod.kata:
        return True
    record = registry.container(name)
    return record is not None and record.cpus == written(grant, state).cpus
