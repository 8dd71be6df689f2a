"""Laws of CpuSet against set[int], of its texts, and of topology order."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kata_pin.base.cpuset import EMPTY, MAX_CPU, CpuPlace, CpuSet, HostTopology, union
from kata_pin.base.errors import ParseError

numbers = st.frozensets(
    st.one_of(st.integers(0, 40), st.integers(0, MAX_CPU), st.sampled_from([31, 32, 63, 64])),
    max_size=60,
)
"""Sets of CPU numbers: crowded near zero, with the word borders."""


@given(numbers, numbers)
def test_algebra_is_that_of_sets(left: frozenset[int], right: frozenset[int]) -> None:
    """Every operator does what set[int] does."""
    a, b = CpuSet(left), CpuSet(right)
    assert set(a | b) == left | right
    assert set(a & b) == left & right
    assert set(a - b) == left - right
    assert set(union([a, b, a])) == left | right
    assert (a <= b, a < b, a >= b, a > b) == (
        left <= right,
        left < right,
        left >= right,
        left > right,
    )
    assert a.isdisjoint(b) == left.isdisjoint(right)
    assert (a == b) == (left == right)


@given(numbers, st.integers(-5, MAX_CPU + 5))
def test_one_set(cpus: frozenset[int], probe: int) -> None:
    """Iteration is ascending; size, truth, membership, first and hash agree with set[int]."""
    found = CpuSet(cpus)
    assert list(found) == sorted(cpus)
    assert len(found) == len(cpus)
    assert bool(found) == bool(cpus)
    assert (probe in found) == (probe in cpus)
    assert not cpus or found.first == min(cpus)
    assert hash(found) == hash(CpuSet.from_bits(found.bits))


@given(numbers)
def test_texts_round_trip(cpus: frozenset[int]) -> None:
    """A list is read back as the same set."""
    found = CpuSet(cpus)
    assert CpuSet.parse(str(found)) == found
    assert str(CpuSet.parse(str(found))) == str(found)


@given(numbers)
def test_ranges_are_maximal(cpus: frozenset[int]) -> None:
    """Ranges cover the set, ascend, and never touch."""
    runs = CpuSet(cpus).ranges()
    assert {n for low, high in runs for n in range(low, high + 1)} == cpus
    assert all(high + 1 < low for (_, high), (low, _) in pairwise(runs))


hostile = st.one_of(
    st.text(max_size=200),
    st.text(alphabet="0123456789-,:/ \n", max_size=200),
    st.lists(
        st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)).map(lambda p: f"{p[0]}-{p[1]}"),
        max_size=20,
    ).map(",".join),
)


@given(hostile)
def test_hostile_text_is_read_or_refused(text: str) -> None:
    """Any text gives a set within bounds or a ParseError, and nothing else."""
    try:
        found = CpuSet.parse(text)
    except ParseError:
        return
    assert found.bits.bit_length() <= MAX_CPU + 1


@st.composite
def topologies(draw: st.DrawFn) -> HostTopology:
    """Draw a host with CPUs of arbitrary places, some of them offline."""
    ids = draw(st.lists(st.integers(0, 300), min_size=1, max_size=24, unique=True))
    small = st.integers(0, 2)
    places = tuple(
        CpuPlace(n, draw(small), draw(small), draw(small), draw(small), draw(small), "")
        for n in ids
    )
    offline = CpuSet(draw(st.frozensets(st.integers(0, 300), max_size=5))) - CpuSet(ids)
    return HostTopology(cpus=places, online=CpuSet(ids), present=CpuSet(ids) | offline)


@given(topologies(), st.randoms(use_true_random=False))
def test_topology_order(host: HostTopology, random: Random) -> None:
    """The order is total: a permutation, the same for any input order, sorted by place."""
    shuffled = list(host.present)
    random.shuffle(shuffled)
    ordered = host.in_order(shuffled)
    assert sorted(ordered) == list(host.present)
    assert ordered == host.in_order(host.present)
    places = [host.get(n) for n in ordered]
    known = [place.order for place in places if place is not None]
    assert known == sorted(known)
    assert all(place is None for place in places[len(known) :])


@given(topologies())
def test_groups_split_the_online_cpus(host: HostTopology) -> None:
    """Nodes, packages, caches and cores each hold every online CPU exactly once."""
    for groups in (host.nodes, host.packages, host.llcs, host.cores):
        assert union(groups.values()) == host.online
        assert sum(len(group) for group in groups.values()) == len(host.online)
    assert all(n in host.siblings(n) for n in host.online)
    assert host.siblings(MAX_CPU) == EMPTY
