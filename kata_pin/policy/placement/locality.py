"""How the CPUs of a pair relate to the guest's memory and thread siblings, in words.

Derived from the placement alone, so it holds for pairs that were only kept, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.placement import Placement
from kata_pin.model.sandbox import GuestTopology
from kata_pin.model.thread import Thread, ThreadKey
from kata_pin.model.topology import HostTopology


def localities(
    threads: Iterable[Thread], placement: Placement, guest: GuestTopology, topology: HostTopology
) -> dict[ThreadKey, str]:
    """Return a sentence for each paired vCPU whose guest node or guest core says something."""
    runs = {
        one.role.vcpu: placement.desired[one.key].wanted
        for one in threads
        if one.role.vcpu is not None and _is_paired(placement, one.key)
    }
    found = {}
    for one in threads:
        index = one.role.vcpu
        if index in runs and _is_paired(placement, one.key):
            parts = [_memory(index, runs[index], guest, topology)]
            parts += [_siblings(index, runs, guest, topology)]
            found[one.key] = "; ".join(part for part in parts if part)
    return found


def _is_paired(placement: Placement, key: ThreadKey) -> bool:
    desired = placement.desired.get(key)
    return desired is not None and desired.paired


def _memory(index: int, run: CpuSet, guest: GuestTopology, topology: HostTopology) -> str:
    """Say where the memory of the vCPU's guest node is, where QEMU bound it."""
    bound = guest.host_nodes.get(guest.numa.get(index, -1))
    if not bound:
        return ""
    nodes = CpuSet(node for cpu in run if (node := topology.node_of(cpu)) is not None)
    here = "where its memory is" if nodes <= bound else f"its memory is on {bound}"
    return f"on host NUMA node {nodes}, {here}"


def _siblings(
    index: int, runs: Mapping[int, CpuSet], guest: GuestTopology, topology: HostTopology
) -> str:
    """Say whether the vCPUs of a guest core share a host core."""
    core = guest.siblings_of(index)
    others = [one for one in sorted(runs) if one != index and guest.siblings_of(one) == core]
    if guest.threads < 2 or not others:
        return ""
    names = ", ".join(f"vCPU {one}" for one in others)
    together = union([runs[index], *(runs[one] for one in others)])
    same = together <= topology.siblings(together.first)
    return f"thread sibling of {names}, {'on the same core' if same else 'on another core'}"
