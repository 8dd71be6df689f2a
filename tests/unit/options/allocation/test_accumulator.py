"""The accumulator and the packed algorithm where hosts are not regular."""

from __future__ import annotations

import pytest

from kata_pin.base.cpuset import EMPTY, CpuPlace, CpuSet, HostTopology
from kata_pin.options.allocation.accumulator import (
    CORE,
    LLC,
    NODE,
    PACKAGE,
    Accumulator,
    Machine,
    Packing,
    take_packed,
)
from tests.support.machines import Shape, host, hybrid
from tests.support.world import flat

HYBRID = Machine.of(hybrid())


def test_half_used_core_of_a_hybrid_host_is_not_free() -> None:
    """The average of 1 CPU a core never makes a half-used core free: its other CPU is taken."""
    free = CpuSet.parse("1-23")
    assert 0 not in Accumulator(HYBRID, free.bits, 2).free(CORE)
    assert take_packed(HYBRID, free, 2) <= free


def test_whole_cores_of_a_hybrid_host() -> None:
    """By the average only small cores are whole; by true sizes the big ones are too."""
    free = HYBRID.cpus
    assert Accumulator(HYBRID, free.bits, 2).free(CORE) == list(range(16, 24))
    assert take_packed(HYBRID, CpuSet.parse("1-15"), 2) == CpuSet.parse("1-2")
    true = Packing(true_sizes=True)
    assert take_packed(HYBRID, CpuSet.parse("1-15"), 2, true) == CpuSet.parse("2-3")


def test_package_smaller_than_the_average() -> None:
    """A whole package of another size counts as free by its true size only."""
    cpus = [CpuPlace(n, node=0, package=n // 4, llc=0, core=n, thread=0, kind="") for n in range(6)]
    machine = Machine.of(host(cpus))
    assert Accumulator(machine, machine.bits, 6).free(PACKAGE) == []
    assert Accumulator(machine, machine.bits, 6, true_sizes=True).free(PACKAGE) == [1, 0]


def test_units_across_two_outer_units_are_listed_once() -> None:
    """A cache shared by two nodes stands once in the order, at its first place."""
    cpus = [CpuPlace(n, node=n // 2, package=0, llc=0, core=n, thread=0, kind="") for n in range(4)]
    machine = Machine.of(host(cpus))
    accumulator = Accumulator(machine, machine.bits, 3)
    assert accumulator.units(LLC) == [0]
    assert accumulator.units(NODE) == [0, 1]


@pytest.mark.parametrize(
    ("spread", "expected"), [(False, [0, 2, 1, 3]), (True, [0, 1, 2, 3])], ids=["packed", "spread"]
)
def test_single_cpus_in_order(spread: bool, expected: list[int]) -> None:
    """Packed goes core by core, spread by number."""
    machine = Machine.of(host(Shape(cores=2, threads=2).cpus()))
    assert Accumulator(machine, machine.bits, 0).cpus(spread=spread) == expected


def test_cpus_that_the_host_lacks_are_not_counted() -> None:
    """What is available but not on the host cannot be taken."""
    machine = Machine.of(flat(2))
    accumulator = Accumulator(machine, CpuSet.parse("1-9").bits, 2)
    assert accumulator.failed
    assert accumulator.available == CpuSet.parse("1").bits


def test_host_without_cpus() -> None:
    """An empty topology gives nothing for nothing."""
    machine = Machine.of(HostTopology(cpus=(), online=EMPTY, present=EMPTY))
    assert take_packed(machine, EMPTY, 0) == EMPTY
    assert machine.threads_per_core == 1
