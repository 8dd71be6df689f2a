"""Zones of the allocator's free pCPUs."""

from __future__ import annotations

from kata_pin.base.documents.pools import Pools
from kata_pin.options.cluster.decide import topology_zones
from tests.unit.cli import documents

POOLS = Pools(reserved="0", housekeeping="0", shared="0-3,12-15", exclusive="4", taken="5")


def test_zones_of_the_allocator() -> None:
    """All pCPUs, without reserved ones, and those that nobody has; 16 pCPUs on two nodes."""
    state = documents.allotted(pools=POOLS)
    first, second = topology_zones(state)
    assert (first.node, second.node) == (0, 1)
    assert (first.capacity, second.capacity) == (8, 8)
    assert (first.allocatable, second.allocatable) == (7, 8)
    assert first.available + second.available == 7  # shared ones without the reserved one


def test_no_zones_where_it_does_not_decide() -> None:
    """Without an allocator, and while another plugin has it suspended."""
    assert topology_zones(documents.state()) == ()
    assert topology_zones(documents.allotted(pools=POOLS, suspended="two plugins")) == ()
