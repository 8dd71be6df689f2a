"""The policy `static` beside our build of the kubelet's algorithm, over whole traces of pods."""

from __future__ import annotations

import pytest

from kata_pin.base.errors import ConfigError
from kata_pin.base.settings import ManagerPolicy
from kata_pin.options.allocation.demand import StaticOptions
from tests.bench import churn
from tests.support.machines import server


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
