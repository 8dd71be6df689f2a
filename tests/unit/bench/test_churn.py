"""The simulated churn: the same questions to everybody, and right figures."""

from __future__ import annotations

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.options.allocation.demand import StaticOptions
from tests.bench import churn
from tests.support.machines import Shape, host

NODES = {0: CpuSet(range(4)), 1: CpuSet(range(4, 8)), 2: CpuSet([8])}


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [("0-3", False), ("0-1", False), ("3-4", True), ("0-4", False), ("0-3,8", False),
     ("0-6,8", True), ("", False)],
)  # fmt: skip
def test_crossing(cpus: str, expected: bool) -> None:
    """Crossing is being in more units than an empty host would need for as many CPUs."""
    assert churn.crosses(CpuSet.parse(cpus), NODES) is expected


def test_trace_is_the_same_for_all() -> None:
    """The seed makes the trace."""
    assert churn.trace(3, 50) == churn.trace(3, 50) != churn.trace(4, 50)


def test_figures() -> None:
    """A pod that is refused leaves nothing; what is given back is free; figures are percentages."""
    topology = host(Shape(uppers=2, llcs=2, cores=32).cpus())
    for allocator in (churn.Kubelet(topology, StaticOptions()), churn.Ours("topology", topology)):
        look = churn.run(allocator, topology, churn.trace(pods=80, alive=60))
        assert look.pods == 80
        assert 0 < look.refused < 80
        assert 50 < look.full <= 100
        for figure in (look.numa, look.caches, look.apart, look.neighbours, look.fragmentation):
            assert 0 <= figure <= 100
        assert allocator.held() == {}


def test_devices() -> None:
    """Pods are the same with devices; only a policy that looks at them gets near them."""
    topology = host(Shape(uppers=2, llcs=2, cores=32).cpus())
    pods = churn.trace(pods=80, alive=10)
    equipped = churn.with_devices(pods, nodes=2)
    assert [pod.sizes for pod in equipped] == [pod.sizes for pod in pods]
    looks = {
        name: churn.run(churn.Ours(name, topology), topology, equipped)
        for name in ("static", "topology")
    }
    assert looks["static"].with_device == looks["topology"].with_device > 20
    assert looks["topology"].far < 20 < looks["static"].far
