"""What an allocation costs on a large server (design.md, "Numbers to hold")."""

from __future__ import annotations

import random
import statistics
import time

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.choice import choose_cpus
from kata_pin.options.allocation.demand import StaticOptions
from tests.support.machines import server


@pytest.mark.parametrize("nodes_per_package", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        StaticOptions(),
        StaticOptions(prefer_align_cpus_by_uncorecache=True),
        StaticOptions(distribute_cpus_across_cores=True),
        StaticOptions(distribute_cpus_across_numa=True),
        StaticOptions(distribute_cpus_across_numa=True, full_pcpus_only=True),
    ],
    ids=["packed", "llc", "spread", "distributed", "distributed-cores"],
)
def test_half_full_server(options: StaticOptions, nodes_per_package: int) -> None:
    """On 256 CPUs, half of them free at random, the median is below 5 ms of CPU time."""
    machine = Machine.of(server(nodes_per_package))
    chance = random.Random(1)
    spent = []
    for _ in range(40):
        free = CpuSet(chance.sample(range(256), 128))
        wanted = 2 * chance.randint(1, 48)
        start = time.process_time()
        choose_cpus(machine, free, wanted, options)
        spent.append((time.process_time() - start) * 1000)
    print(f"median {statistics.median(spent):.2f} ms, worst {max(spent):.2f} ms")
    assert statistics.median(spent) <= 5
