"""The packed algorithm: as few and as full units as possible (kubelet takeByTopologyNUMAPacked)."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.policy.alloc.accumulator import Accumulator
from kata_pin.policy.alloc.failure import AllocError, AllocFailure, not_enough
from kata_pin.policy.alloc.topology import CORE, Machine


@dataclass(frozen=True, slots=True)
class Packing:
    """How to pack. `spread` skips whole cores and takes CPUs by number, package by package.

    `by_llc` prefers one last-level cache. `true_sizes` is this project's own: see Accumulator.
    """

    spread: bool = False
    by_llc: bool = False
    true_sizes: bool = False


PLAIN = Packing()


def take_packed(
    machine: Machine, available: CpuSet, wanted: int, packing: Packing = PLAIN
) -> CpuSet:
    """Return `wanted` of the available CPUs; AllocError if there are not as many.

    Whole units of the upper level first, then of the lower level, then caches (`by_llc`), whole
    cores, and single CPUs beginning with cores already in part use. A step with nothing left
    to take does nothing.
    """
    accumulator = Accumulator(machine, available.bits, wanted, true_sizes=packing.true_sizes)
    if accumulator.satisfied:
        return EMPTY
    if accumulator.failed:
        raise not_enough(wanted, len(available))
    accumulator.take_whole(machine.upper)
    accumulator.take_whole(machine.lower)
    if packing.by_llc:
        accumulator.take_llcs()
    if not packing.spread:
        accumulator.take_whole(CORE)
    accumulator.take_cpus(spread=packing.spread)
    if accumulator.needed > 0:
        raise AllocError(
            AllocFailure.FAILED, f"failed to allocate {wanted} CPUs from {available or 'none'}"
        )
    return CpuSet.from_bits(accumulator.taken)
