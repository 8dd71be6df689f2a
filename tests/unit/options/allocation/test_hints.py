"""NUMA hints and what the topology manager makes of them."""

from __future__ import annotations

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.settings import ManagerPolicy
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.choice import Affinity, Hint, choose, make_hints
from tests.support.machines import Shape, host

FOUR = Machine.of(host(Shape(uppers=2, lowers=2, cores=4, threads=1).cpus()))
"""2 packages of 2 nodes of 4 CPUs."""


def hints(
    available: str, wanted: int, *, reusable: str = "", by_socket: bool = False
) -> dict[str, bool]:
    """Return node lists and whether they are preferred."""
    made = make_hints(
        FOUR, CpuSet.parse(available), CpuSet.parse(reusable), wanted, align_by_socket=by_socket
    )
    return {str(hint.nodes): hint.preferred for hint in made}


def test_every_set_that_can_serve_is_a_hint() -> None:
    """All sets with enough available CPUs are hints, small ones first; the fewest are preferred."""
    got = hints("0-3,4-5,8-9", 4)
    assert list(got) == ["0", "0-1", "0,2", "0,3", "1-2", "0-2", "0-1,3", "0,2-3", "1-3", "0-3"]
    assert [nodes for nodes, preferred in got.items() if preferred] == ["0"]


def test_preferred_is_what_an_idle_host_would_need() -> None:
    """Where only two nodes together can serve what one could when idle, nothing is preferred."""
    assert set(hints("0-1,4-5", 4).values()) == {False}


def test_reusable_cpus_bind_the_hint() -> None:
    """Sets without all nodes of reusable CPUs are left out; those CPUs count as available."""
    assert list(hints("0-2", 4, reusable="4")) == ["0-1", "0-2", "0-1,3", "0-3"]


def test_by_socket_the_packages_count() -> None:
    """align-by-socket also prefers sets that span no more packages than needed."""
    plain, wide = hints("0-15", 4), hints("0-15", 4, by_socket=True)
    assert not plain["0-1"]
    assert wide["0-1"]
    assert not wide["0,2"]
    assert wide["0"]


ALL = CpuSet.parse("0-3")


def hint(nodes: str, *, preferred: bool) -> Hint:
    """Return a hint for a node list."""
    return Hint(CpuSet.parse(nodes), preferred)


TWO = (hint("1-2", preferred=False), hint("3", preferred=True), hint("2", preferred=True))
WIDE = (hint("0-1", preferred=False), hint("0,3", preferred=False))


@pytest.mark.parametrize(
    ("policy", "given", "nodes", "admit"),
    [
        (ManagerPolicy.NONE, TWO, None, True),
        (ManagerPolicy.BEST_EFFORT, TWO, "2", True),
        (ManagerPolicy.BEST_EFFORT, WIDE, "0-1", True),
        (ManagerPolicy.BEST_EFFORT, (), "0-3", True),
        (ManagerPolicy.RESTRICTED, WIDE, "0-1", False),
        (ManagerPolicy.RESTRICTED, TWO, "2", True),
        (ManagerPolicy.RESTRICTED, (), "0-3", False),
        (ManagerPolicy.RESTRICTED, None, None, True),
        (ManagerPolicy.SINGLE_NUMA_NODE, TWO, "2", True),
        (ManagerPolicy.SINGLE_NUMA_NODE, (hint("0-1", preferred=True),), None, False),
    ],
)
def test_choice(
    policy: ManagerPolicy, given: tuple[Hint, ...] | None, nodes: str | None, admit: bool
) -> None:
    """Preferred before narrow before low; restricted and single-numa-node reject the rest."""
    expected = None if nodes is None else CpuSet.parse(nodes)
    assert choose(given, policy, ALL) == Affinity(expected, admit)
