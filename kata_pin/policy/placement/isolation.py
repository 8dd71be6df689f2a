"""Threads on isolated CPUs, which no scheduler domain balances (D11).

A thread that may run on several isolated CPUs sits on one and never moves
(/sys/devices/system/cpu/isolated, isolcpus=domain in kernel-parameters.txt). So every thread whose
CPUs touch isolated ones gets one CPU, dealt round robin; threads that are not paired take unpaired
CPUs first, and keep them all where those are not isolated.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.topology import HostTopology
from kata_pin.policy.placement.want import Fit

_DETAIL: Final = "one CPU only: isolated CPUs are not load-balanced"


def deal(fits: Sequence[Fit], topology: HostTopology) -> list[Fit]:
    """Return the fits with one CPU where isolated CPUs are involved, in the same order."""
    isolated = topology.isolated
    if not isolated:
        return list(fits)
    result = list(fits)
    paired = [i for i, one in enumerate(result) if one.paired]
    _deal(result, [(i, result[i].applied) for i in paired], topology)
    taken = union(result[i].applied for i in paired)
    rest = [
        (i, _unpaired_first(one.applied, taken, isolated))
        for i, one in enumerate(result)
        if not one.paired
    ]
    _deal(result, rest, topology)
    return result


def _unpaired_first(applied: CpuSet, paired: CpuSet, isolated: CpuSet) -> CpuSet:
    if len(applied) < 2 or applied.isdisjoint(isolated):
        return applied
    return applied - paired or applied


def _deal(fits: list[Fit], allowed: Sequence[tuple[int, CpuSet]], topology: HostTopology) -> None:
    """Replace fits in place: `allowed` says for each number the CPUs it may have."""
    groups: dict[CpuSet, list[int]] = {}
    for number, cpus in allowed:
        if len(cpus) > 1 and not cpus.isdisjoint(topology.isolated):
            groups.setdefault(cpus, []).append(number)
        elif cpus != fits[number].applied:
            fits[number] = fits[number]._replace(applied=cpus, detail=_DETAIL)
    for cpus, numbers in groups.items():
        _deal_group(fits, cpus, numbers, topology)


def _deal_group(fits: list[Fit], cpus: CpuSet, numbers: list[int], topology: HostTopology) -> None:
    """Deal one set of CPUs evenly; a thread that already sits on one of them stays there."""
    order = topology.in_order(cpus)
    load = dict.fromkeys(order, 0)
    fair = -(-len(numbers) // len(load))
    moving: list[int] = []
    for number in numbers:
        observed = fits[number].want.thread.task.affinity
        if len(observed) == 1 and load.get(observed.first, fair) < fair:
            load[observed.first] += 1
            fits[number] = _with_one(fits[number], observed)
        else:
            moving.append(number)
    lightest = [(load[cpu], place, cpu) for place, cpu in enumerate(order)]
    heapq.heapify(lightest)
    for number in moving:
        count, place, cpu = lightest[0]
        heapq.heapreplace(lightest, (count + 1, place, cpu))
        fits[number] = _with_one(fits[number], CpuSet((cpu,)))


def _with_one(one: Fit, cpu: CpuSet) -> Fit:
    detail = f"{one.detail}; {_DETAIL}" if one.detail else _DETAIL
    return one._replace(applied=cpu, detail=detail)
