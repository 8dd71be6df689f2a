"""The distributed algorithm's two deviations from the kubelet."""

from __future__ import annotations

import time

from kata_pin.base.cpuset import CpuSet
from kata_pin.options.allocation.accumulator import Machine, take_distributed
from tests.support.machines import Shape, host


def test_scattered_cpus_do_not_hang() -> None:
    """Two nodes with 3 CPUs left hold 6 but not 3 groups of 2: skipped, where the kubelet loops."""
    machine = Machine.of(host(Shape(lowers=4, cores=8, threads=1).cpus()))
    # 7 groups of 2 over 4 nodes with 5 free CPUs: one group each, 3 more to hand out.
    free = CpuSet.parse("0-4,8-12,16-20,24-28")
    assert take_distributed(machine, free, 14, 2) == CpuSet.parse("0-3,8-11,16-19,24-25")


def test_a_node_gives_only_the_groups_that_it_has() -> None:
    """Two nodes have CPUs beyond the even share, for 1 and 3 groups: the latter gives two."""
    machine = Machine.of(host(Shape(lowers=4, cores=8, threads=1).cpus()))
    free = CpuSet.parse("0-1,8-9,16-19,24-31")
    taken = take_distributed(machine, free, 14, 2)
    assert taken == CpuSet.parse("0-1,8-9,16-19,24-29")


def test_search_is_bounded_on_many_nodes() -> None:
    """Half of 32 unevenly used nodes are found in bounded time: there are 601 million ways."""
    machine = Machine.of(host(Shape(uppers=2, lowers=16, cores=24, threads=1).cpus()))
    free = machine.cpus - CpuSet(
        cpu for node in range(32) for cpu in range(node * 24, node * 24 + node * 7 % 23)
    )
    start = time.process_time()
    got = take_distributed(machine, free, 233)
    assert len(got) == 233
    assert got <= free
    assert time.process_time() - start < 10
