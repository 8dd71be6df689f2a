"""Whole cores only (the kubelet's option full-pcpus-only), also on hosts with unequal cores.

The kubelet assumes one core size for the whole host. That is wrong on hybrid hosts, and with a
thread offline; here each core has its own size. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from kata_pin.model.cpuset import CpuSet
from kata_pin.policy.alloc.failure import AllocError, AllocFailure, not_enough
from kata_pin.policy.alloc.topology import Machine


def whole_cores(machine: Machine, free: int) -> int:
    """Return the CPUs of all cores of which every CPU is free."""
    return machine.union(core for core in machine.cores.values() if core & ~free == 0)


def in_whole_cores(
    machine: Machine, free: CpuSet, wanted: int, choose: Callable[[CpuSet], CpuSet]
) -> CpuSet:
    """Return what `choose` takes of the free whole cores, which must be whole cores again.

    If small cores make that impossible, only the largest are offered. AllocError if the request is
    no multiple of the largest core's CPUs, or there are too few.
    """
    threads = max(core.bit_count() for core in machine.cores.values())
    if wanted % threads:
        raise AllocError(
            AllocFailure.SMT_ALIGNMENT,
            f"requested {wanted} CPUs, not a multiple of CPUs per core = {threads}",
        )
    whole = CpuSet.from_bits(whole_cores(machine, free.bits))
    large = whole & CpuSet.from_bits(
        machine.union(core for core in machine.cores.values() if core.bit_count() == threads)
    )
    for offered in (whole, large):
        if len(offered) < wanted:
            raise not_enough(wanted, len(offered))
        chosen = choose(offered)
        if whole_cores(machine, chosen.bits) == chosen.bits:
            return chosen
    raise AllocError(
        AllocFailure.SMT_ALIGNMENT, f"cannot take {wanted} of CPUs {large} as whole cores"
    )
