"""The simulated churn: the same questions to everybody, and right figures."""

from __future__ import annotations

import pytest

from kata_pin.errors import ConfigError
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.settings import ManagerPolicy
from kata_pin.policy.alloc.options import StaticOptions
from tests.bench import churn
from tests.support.machines import Shape, host, server

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


@pytest.mark.parametrize("manager", ManagerPolicy)
@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        (1, {}),
        (4, {}),
        (1, {"prefer-align-cpus-by-uncorecache": "true"}),
        (4, {"prefer-align-cpus-by-uncorecache": "true"}),
        (4, {"align-by-socket": "true"}),
    ],
)
def test_static_gives_what_the_kubelet_gives(
    nodes: int, options: dict[str, str], manager: ManagerPolicy
) -> None:
    """Over a whole trace, VM by VM, the policy `static` takes exactly the kubelet's CPUs.

    Whom the topology manager refuses is refused by both. Nobody else is: the kubelet gives its last
    shared CPU away, we do not.
    """
    topology = server(nodes)
    if options.get("align-by-socket") and manager is ManagerPolicy.SINGLE_NUMA_NODE:
        with pytest.raises(ConfigError, match="single-numa-node"):
            churn.Ours("static", topology, options, manager)
        return
    kubelet = churn.Kubelet(
        topology, StaticOptions.parse({"strict-cpu-reservation": "true", **options}), manager
    )
    ours = churn.Ours("static", topology, options, manager)
    leaving: list[tuple[float, str]] = []
    for number, pod in enumerate(churn.trace(pods=150, alive=12)):
        for until, name in list(leaving):
            if until <= number:
                kubelet.go(name)
                ours.go(name)
                leaving.remove((until, name))
        came = kubelet.come(pod)
        assert came == ours.come(pod)
        assert came or manager is not ManagerPolicy.NONE
        if came:
            leaving.append((pod.until, pod.name))
        theirs = [cpus for of in kubelet.held().values() for cpus in of.values()]
        assert sorted(map(str, theirs)) == sorted(
            str(cpus) for of in ours.held().values() for cpus in of.values()
        )
        assert kubelet.held().keys() == ours.held().keys()


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
