"""The kubelet's ways to take CPUs: packed or distributed, hinted nodes first (policy_static.go).

Pure. Out of scope: which container gets CPUs of its own.
"""

from __future__ import annotations

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.policy.alloc.distributed import take_distributed
from kata_pin.policy.alloc.options import StaticOptions
from kata_pin.policy.alloc.packed import Packing, take_packed
from kata_pin.policy.alloc.topology import Machine


def take(machine: Machine, available: CpuSet, wanted: int, options: StaticOptions) -> CpuSet:
    """Return `wanted` of the available CPUs by the algorithm that the options choose.

    Raises AllocError when there are not enough.
    """
    packing = Packing(
        spread=options.distribute_cpus_across_cores,
        by_llc=options.prefer_align_cpus_by_uncorecache,
        true_sizes=options.true_unit_sizes,
    )
    if options.distribute_cpus_across_numa:
        group = machine.threads_per_core if options.full_pcpus_only else 1
        return take_distributed(machine, available, wanted, group, packing)
    return take_packed(machine, available, wanted, packing)


def take_hinted(
    machine: Machine,
    allocatable: CpuSet,
    wanted: int,
    options: StaticOptions,
    nodes: CpuSet | None = None,
) -> CpuSet:
    """Return `wanted` CPUs, from the hinted nodes as many as they have, the rest from anywhere.

    With align-by-socket the nodes are widened to their packages. Raises AllocError.
    """
    aligned = hinted(machine, allocatable, options, nodes)
    taken = take(machine, aligned, min(wanted, len(aligned)), options)
    return taken | take(machine, allocatable - taken, wanted - len(taken), options)


def hinted(
    machine: Machine, allocatable: CpuSet, options: StaticOptions, nodes: CpuSet | None
) -> CpuSet:
    """Return what of the CPUs is in the hinted nodes; nothing without a hint."""
    if nodes is None:
        return EMPTY
    bits = machine.node_bits(nodes)
    if options.align_by_socket:
        bits = machine.package_bits(bits)
    return allocatable & CpuSet.from_bits(bits)
