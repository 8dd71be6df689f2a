"""HostTopology: order, groups, and CPUs that are not there."""

from __future__ import annotations

from kata_pin.base.cpuset import EMPTY, CpuPlace, CpuSet, HostTopology
from tests.support.world import cpus, smt_host, without


def test_order_is_node_package_llc_core_thread() -> None:
    """Each level counts before the next, and before the CPU number."""
    levels = [
        CpuPlace(9, node=0, package=0, llc=0, core=0, thread=0, kind=""),
        CpuPlace(8, node=0, package=0, llc=0, core=0, thread=1, kind=""),
        CpuPlace(7, node=0, package=0, llc=0, core=5, thread=0, kind=""),
        CpuPlace(6, node=0, package=0, llc=4, core=1, thread=0, kind=""),
        CpuPlace(5, node=0, package=1, llc=0, core=0, thread=0, kind=""),
        CpuPlace(4, node=1, package=0, llc=0, core=0, thread=0, kind=""),
    ]
    online = CpuSet(range(4, 10))
    host = HostTopology(cpus=tuple(reversed(levels)), online=online, present=online)
    assert host.in_order(online) == [9, 8, 7, 6, 5, 4]


def test_unknown_cpus_come_last_by_number() -> None:
    """CPUs without a place (offline, never seen) follow in numeric order."""
    host = without(smt_host(), "2,9")
    assert host.in_order([200, 9, 3, 2, 0]) == [0, 3, 2, 9, 200]


def test_groups() -> None:
    """Nodes, packages, caches and cores hold their online CPUs."""
    host = without(smt_host(), "8")
    assert {n: str(group) for n, group in host.nodes.items()} == {0: "0-3,9-11", 1: "4-7,12-15"}
    assert host.packages == host.nodes
    assert [str(group) for group in host.llcs.values()] == ["0-3,9-11", "4-7,12-15"]
    assert host.cores[1] == cpus("1,9")


def test_siblings_and_place() -> None:
    """Siblings are those online; an offline CPU has neither place nor siblings."""
    host = without(smt_host(), "8")
    assert host.siblings(0) == cpus("0")
    assert host.siblings(9) == cpus("1,9")
    assert (host.siblings(8), host.get(8), host.node_of(8)) == (EMPTY, None, None)
    assert host.node_of(12) == 1
