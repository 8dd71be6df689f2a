"""Exclusive CPUs cut into runs (D10 and reserve:k of D11)."""

from __future__ import annotations

import pytest

from kata_pin.base.cpuset import HostTopology
from kata_pin.placement.exclusive import Pool, Pools, apportion, exclusive_pools, runs
from kata_pin.placement.masks import sandbox_mask
from tests.support.world import exclusive, flat, node, sandbox, shared, smt_host, without


def pools_of(*lists: str, reserve: int = 0, topology: HostTopology | None = None) -> Pools:
    """Return the pools of containers a, b, ... with these exclusive CPUs."""
    containers = [exclusive(chr(97 + i), text) for i, text in enumerate(lists)]
    at = node(topology or flat(16))
    mask = sandbox_mask(sandbox(*containers, shared("z", "0")), at)
    return exclusive_pools(mask, at.topology, reserve)


def lists(found: Pools) -> list[tuple[str, list[int]]]:
    """Return the pools as plain values."""
    return [(pool.container_id, list(pool.cpus)) for pool in found.pools]


def test_container_by_container_in_topology_order() -> None:
    """Record order of containers comes first, then node, package, LLC, core and thread."""
    found = pools_of("4-7,12-13", "0-1,8", topology=smt_host())
    assert lists(found) == [("a", [4, 12, 5, 13, 6, 7]), ("b", [0, 8, 1])]
    assert found.size == 9


def test_a_cpu_is_in_one_pool_only() -> None:
    """Of two claims on one CPU the first recorded container's holds, and it is said."""
    found = pools_of("4-6", "5-8")
    assert lists(found) == [("a", [4, 5, 6]), ("b", [7, 8])]
    assert str(found.overlap) == "5-6"


def test_a_claim_inside_another_leaves_no_pool() -> None:
    """A container whose every exclusive CPU is another's has nothing to pair."""
    assert lists(pools_of("4-6", "5-6")) == [("a", [4, 5, 6])]


def test_offline_cpus_are_not_paired() -> None:
    """An exclusive CPU that is off is reported, not dealt."""
    found = pools_of("4-6", topology=without(flat(16), "5"))
    assert lists(found) == [("a", [4, 6])]
    assert str(found.offline) == "5"


@pytest.mark.parametrize(
    ("reserve", "pools", "reserved", "emptied"),
    [
        pytest.param(0, [("a", [4, 5]), ("b", [6, 7])], (), (), id="none"),
        pytest.param(1, [("a", [4, 5]), ("b", [6])], (7,), (), id="the last one"),
        pytest.param(2, [("a", [4, 5])], (6, 7), ("b",), id="all of the last container"),
        pytest.param(3, [("a", [4])], (5, 6, 7), ("b",), id="across containers"),
        pytest.param(4, [], (4, 5, 6, 7), ("a", "b"), id="k = x"),
        pytest.param(99, [], (4, 5, 6, 7), ("a", "b"), id="k > x"),
        pytest.param(-1, [("a", [4, 5]), ("b", [6, 7])], (), (), id="a negative k is none"),
    ],
)
def test_reserve_takes_the_last(
    reserve: int,
    pools: list[tuple[str, list[int]]],
    reserved: tuple[int, ...],
    emptied: tuple[str, ...],
) -> None:
    """reserve:k takes the last k exclusive CPUs, and x shrinks by k."""
    found = pools_of("4-5", "6-7", reserve=reserve)
    assert lists(found) == pools
    assert found.reserved == reserved
    assert found.emptied == emptied
    assert found.exclusive == 4
    assert found.size == 4 - len(reserved)


@pytest.mark.parametrize(
    ("sizes", "vcpus", "expected"),
    [
        pytest.param([4], 2, [2], id="one container"),
        pytest.param([4, 2], 3, [2, 1], id="proportional"),
        pytest.param([3, 3], 5, [3, 2], id="a tie goes to the first recorded"),
        pytest.param([2, 5], 4, [1, 3], id="the largest remainder first"),
        pytest.param([1, 6], 4, [1, 3], id="at least one each, the raised gets no second"),
        pytest.param([9, 16, 15], 4, [1, 2, 1], id="one raised to 1 has no remainder to hear"),
        pytest.param([6, 1, 1], 3, [1, 1, 1], id="one each when there are no more"),
        pytest.param([8, 1, 1], 5, [3, 1, 1], id="the largest gives back what raising took"),
        pytest.param([5, 5, 1, 1], 5, [2, 1, 1, 1], id="a tie gives back from the end"),
    ],
)
def test_apportion(sizes: list[int], vcpus: int, expected: list[int]) -> None:
    """Shares follow max(1, floor(n x_c / x)), then largest remainders, ties in record order."""
    assert apportion(sizes, vcpus) == expected


@pytest.mark.parametrize(
    ("vcpus", "expected"),
    [
        pytest.param(9, ["4", "12", "5", "13", "0"], id="more than enough: one CPU each"),
        pytest.param(5, ["4", "12", "5", "13", "0"], id="just enough"),
        pytest.param(4, ["4,12", "5", "13", "0"], id="longer runs first"),
        pytest.param(3, ["4,12", "5,13", "0"], id="runs are consecutive in topology order"),
        pytest.param(2, ["4-5,12-13", "0"], id="a run never crosses a container"),
    ],
)
def test_runs(vcpus: int, expected: list[str]) -> None:
    """Pools are cut container by container into runs that do not overlap."""
    pools = [Pool("a", (4, 12, 5, 13)), Pool("b", (0,))]
    assert [str(run.cpus) for run in runs(pools, vcpus)] == expected
