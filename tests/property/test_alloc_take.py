"""The packed and the distributed algorithm on invented hosts, against a second reading."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuPlace, CpuSet, union
from kata_pin.base.errors import ConfigError
from kata_pin.base.settings import ManagerPolicy
from kata_pin.options.allocation.accumulator import Machine, Packing, take_distributed, take_packed
from kata_pin.options.allocation.choice import KubeletChoice, choose_cpus
from kata_pin.options.allocation.demand import StaticOptions
from kata_pin.options.allocation.policy import AllocError, AllocFailure
from tests.support.alloc_reference import Reference
from tests.support.machines import Shape, host

SHAPES = st.builds(
    Shape,
    uppers=st.integers(1, 3),
    lowers=st.integers(1, 3),
    llcs=st.integers(1, 2),
    cores=st.integers(1, 4),
    threads=st.sampled_from([1, 2, 2, 4]),
    packages_in_nodes=st.booleans(),
    threads_apart=st.booleans(),
)
OPTIONS = st.sampled_from(
    [
        StaticOptions(),
        StaticOptions(distribute_cpus_across_cores=True),
        StaticOptions(prefer_align_cpus_by_uncorecache=True),
        StaticOptions(distribute_cpus_across_numa=True),
        StaticOptions(distribute_cpus_across_numa=True, full_pcpus_only=True),
        StaticOptions(true_unit_sizes=True),
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[CpuPlace], CpuSet, int]:
    """Draw a host, what is available on it (cores in part or as a whole), and a number of CPUs."""
    cpus = draw(SHAPES).cpus()
    by = draw(st.sampled_from(["cpu", "core", "llc"]))
    units = sorted({getattr(cpu, by) for cpu in cpus})
    used = draw(st.sets(st.sampled_from(units)))
    odd = draw(st.sets(st.sampled_from([cpu.cpu for cpu in cpus]), max_size=3))
    free = {cpu.cpu for cpu in cpus if getattr(cpu, by) not in used} ^ odd
    return cpus, CpuSet(free), draw(st.integers(0, len(free)))


@settings(deadline=None, max_examples=300)
@given(requests(), st.booleans(), st.booleans())
def test_packed_is_the_rules(
    request_: tuple[list[CpuPlace], CpuSet, int], spread: bool, by_llc: bool
) -> None:
    """The packed algorithm gives what a slow reading of its rules gives."""
    cpus, free, wanted = request_
    expected = Reference(cpus).packed(set(free), wanted, spread=spread, by_llc=by_llc)
    got = take_packed(Machine.of(host(cpus)), free, wanted, Packing(spread=spread, by_llc=by_llc))
    assert got == CpuSet(expected)


@settings(deadline=None)
@given(requests(), st.sampled_from([1, 2, 4]), st.booleans())
def test_distributed_is_the_best_of_all_splits(
    request_: tuple[list[CpuPlace], CpuSet, int], group: int, whole: bool
) -> None:
    """The distributed algorithm finds what trying every combination finds."""
    cpus, free, wanted = request_
    if whole:
        wanted -= wanted % group
    expected = Reference(cpus).distributed(set(free), wanted, group)
    assert take_distributed(Machine.of(host(cpus)), free, wanted, group) == CpuSet(expected)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=2, max_size=7),
    st.sampled_from([1, 2, 4]),
    st.data(),
)
def test_distributed_is_the_best_on_uneven_nodes(
    nodes: list[tuple[int, int]], group: int, data: st.DataObject
) -> None:
    """The same on nodes of many sizes, unevenly used, where several give a remainder."""
    cpus: list[CpuPlace] = []
    free: list[int] = []
    for node, (size, used) in enumerate(nodes):
        first = len(cpus)
        cpus += [CpuPlace(first + n, node, 0, 0, first + n, 0, "") for n in range(size)]
        free += range(first + min(used, size), first + size)
    wanted = data.draw(st.integers(0, len(free) // group)) * group
    expected = Reference(cpus).distributed(set(free), wanted, group)
    got = take_distributed(Machine.of(host(cpus)), CpuSet(free), wanted, group)
    assert got == CpuSet(expected)


@given(requests(), OPTIONS)
def test_gives_as_many_as_wanted_of_what_is_free(
    request_: tuple[list[CpuPlace], CpuSet, int], options: StaticOptions
) -> None:
    """The result has the wanted size, is available, leaves the rest, and is the same each time."""
    cpus, free, wanted = request_
    machine = Machine.of(host(cpus))
    got = choose_cpus(machine, free, wanted, options)
    assert len(got) == wanted
    assert got <= free
    assert choose_cpus(Machine.of(host(cpus[::-1])), free, wanted, options) == got
    second = choose_cpus(machine, free - got, len(free) - wanted, options)
    assert second.isdisjoint(got)
    assert second | got == free


@given(requests(), OPTIONS, st.sampled_from(ManagerPolicy))
def test_what_is_shown_of_a_choice_is_the_choice(
    request_: tuple[list[CpuPlace], CpuSet, int], options: StaticOptions, manager: ManagerPolicy
) -> None:
    """The steps in which CPUs are taken make up what is chosen; a refusal takes nothing."""
    cpus, free, wanted = request_
    try:
        choice = KubeletChoice(Machine.of(host(cpus)), options, manager)
        chosen = choice.choose(free, wanted, EMPTY)
    except (AllocError, ConfigError):
        return
    assert len(chosen) == wanted
    assert union(one.taken for one in choice.candidates(free, wanted, EMPTY)) == chosen


@given(requests(), OPTIONS, st.integers(1, 9))
def test_refuses_more_than_there_is(
    request_: tuple[list[CpuPlace], CpuSet, int], options: StaticOptions, more: int
) -> None:
    """A request above what is available fails with the kind that says so."""
    cpus, free, _ = request_
    with pytest.raises(AllocError) as caught:
        choose_cpus(Machine.of(host(cpus)), free, len(free) + more, options)
    assert caught.value.failure is AllocFailure.NOT_ENOUGH_CPUS


@given(requests(), OPTIONS, st.data())
def test_offline_cpus_do_no_harm(
    request_: tuple[list[CpuPlace], CpuSet, int], options: StaticOptions, data: st.DataObject
) -> None:
    """On a ragged host, with CPUs offline, still nothing is given that is not available."""
    cpus, free, wanted = request_
    gone = data.draw(st.sets(st.sampled_from(cpus), max_size=max(0, len(cpus) - 1)))
    online = [cpu for cpu in cpus if cpu not in gone]
    usable = free & CpuSet(cpu.cpu for cpu in online)
    wanted = min(wanted, len(usable))
    got = choose_cpus(Machine.of(host(online)), free, wanted, options)
    assert len(got) == wanted
    assert got <= usable


@given(requests(), OPTIONS, st.integers(0, 40), st.integers(1, 3))
def test_only_the_order_of_ids_counts(
    request_: tuple[list[CpuPlace], CpuSet, int], options: StaticOptions, offset: int, step: int
) -> None:
    """New numbers in the same order, for CPUs and for every unit, give the same answer renamed."""
    cpus, free, wanted = request_

    def new(number: int) -> int:
        return number * step + offset

    renamed = [
        replace(
            cpu,
            cpu=new(cpu.cpu),
            core=new(cpu.core),
            llc=new(cpu.llc),
            node=new(cpu.node),
            package=new(cpu.package),
        )
        for cpu in cpus
    ]
    got = choose_cpus(Machine.of(host(cpus)), free, wanted, options)
    again = choose_cpus(Machine.of(host(renamed)), CpuSet(map(new, free)), wanted, options)
    assert again == CpuSet(map(new, got))
