"""What holds of sources that disagree, whatever they tell."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.sandbox import Container, ReportedCpuset
from kata_pin.base.values import ContainerState, CpusetSource
from kata_pin.placement.masks import LIVE, believed, is_stale, resolve_cpusets, why
from tests.support import world

SETS = st.sets(st.integers(0, 9)).map(CpuSet)
TOLD = st.builds(
    ReportedCpuset,
    st.sampled_from([CpusetSource.NRI, CpusetSource.KATA, CpusetSource.BUNDLE]),
    st.none() | SETS,
    st.integers(1, 5),
)
TOLDS = st.lists(TOLD, max_size=3, unique_by=lambda one: one.source).map(tuple)


@st.composite
def containers(draw: st.DrawFn) -> tuple[Container, ...]:
    """Return a few containers as the registry has them: with the cpuset that is believed."""
    made = []
    for number in range(draw(st.integers(1, 4))):
        told = draw(TOLDS)
        winner = believed(told)
        one = world.exclusive(f"c{number}", "0") if draw(st.booleans()) else world.shared("x", "0")
        state = draw(st.sampled_from([ContainerState.RUNNING, ContainerState.STOPPED]))
        cpus = winner.cpus if winner else None
        made.append(replace(one, id=f"c{number}", cpus=cpus, reported=told, state=state))
    return tuple(made)


@given(TOLDS)
def test_the_order_of_telling_does_not_matter(told: tuple[ReportedCpuset, ...]) -> None:
    """Reordered values give the same, and a live one wins whenever there is one."""
    winner = believed(told)
    for order in permutations(told):
        assert believed(order) == winner
        assert why(order) == why(told)
    if winner is not None:
        assert (winner.source in LIVE) is any(one.source in LIVE for one in told)


@given(containers(), SETS)
def test_a_union_is_used_up_and_never_exceeded(
    every: tuple[Container, ...], written: CpuSet
) -> None:
    """What only config.json tells of stays inside the union; together all have all of it."""
    found = resolve_cpusets(every, kubelet=None, configured=written)
    stale = {one.id for one in every if is_stale(one)}
    for before, after in zip(every, found, strict=True):
        if before.id not in stale:
            assert after == before
        elif after != before:
            assert after.cpus is not None
            assert EMPTY < after.cpus <= written
    if written and any(one.cpus for one in every if one.id in stale):
        assert written <= union(one.cpus or EMPTY for one in found)


@given(containers(), SETS)
def test_settling_twice_changes_nothing_more(every: tuple[Container, ...], written: CpuSet) -> None:
    """The union of what was worked out is the union: a second look agrees."""
    once = resolve_cpusets(every, kubelet=None, configured=written)
    twice = resolve_cpusets(once, kubelet=None, configured=written)
    assert [one.cpus for one in twice] == [one.cpus for one in once]
