"""The kubelet's choice with a topology manager beside it."""

from __future__ import annotations

import pytest

from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import ConfigError
from kata_pin.base.settings import ManagerPolicy
from kata_pin.base.values import RefusalKind
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.choice import KubeletChoice, take_hinted
from kata_pin.options.allocation.demand import StaticOptions
from kata_pin.options.allocation.policies import create
from kata_pin.options.allocation.policy import AllocError
from tests.support.kubelet_static import status_reason
from tests.support.machines import Shape, host, server
from tests.support.podspecs import container, pod

HOST = host(Shape(uppers=2, lowers=2, cores=4, threads=1).cpus())
"""16 CPUs: 2 packages of 2 nodes of 4."""

SCATTERED = CpuSet.parse("2-3,6-7,11,15")
"""Two free CPUs in each node of the first package, one in each of the second."""


def chosen(manager: str, wanted: int, *, by_socket: bool = False) -> str:
    """Return what is chosen of the scattered CPUs, or the kubelet's word for a refusal."""
    options = StaticOptions(align_by_socket=by_socket)
    choice = KubeletChoice(Machine.of(HOST), options, ManagerPolicy(manager))
    try:
        return str(choice.choose(SCATTERED, wanted, EMPTY))
    except AllocError as error:
        return status_reason(error)


@pytest.mark.parametrize(
    ("manager", "by_socket", "wanted", "expected"),
    [
        ("none", False, 3, "2,11,15"),
        ("best-effort", False, 3, "2-3,6"),
        ("restricted", False, 3, "TopologyAffinityError"),
        ("restricted", True, 3, "2-3,6"),
        ("single-numa-node", False, 2, "2-3"),
        ("single-numa-node", False, 3, "TopologyAffinityError"),
        ("restricted", False, 7, "UnexpectedAdmissionError"),
    ],
)
def test_hints_are_drawn_from_first(
    manager: str, by_socket: bool, wanted: int, expected: str
) -> None:
    """The fewest nodes, a refusal where the manager wants one, and sockets where they count."""
    assert chosen(manager, wanted, by_socket=by_socket) == expected


@pytest.mark.parametrize(
    ("by_socket", "free", "wanted", "expected"),
    [
        pytest.param(False, "0-15", 2, "8-9", id="inside"),
        pytest.param(False, "0-3,8,12-15", 3, "0-1,8", id="rest-from-anywhere"),
        pytest.param(True, "0-3,8,12-15", 3, "8,12-13", id="rest-from-the-package"),
        pytest.param(False, "0-3", 2, "0-1", id="nothing-there"),
    ],
)
def test_what_the_hinted_nodes_lack(by_socket: bool, free: str, wanted: int, expected: str) -> None:
    """align-by-socket looks in the package of the hinted nodes before it looks anywhere."""
    options = StaticOptions(align_by_socket=by_socket)
    taken = take_hinted(Machine.of(HOST), CpuSet.parse(free), wanted, options, CpuSet([2]))
    assert taken == CpuSet.parse(expected)


def test_a_policy_refuses_what_the_manager_does() -> None:
    """The setting reaches the policy, and the refusal has the reason; best effort uses the pool."""
    settings = Alloc(topology_manager=ManagerPolicy.SINGLE_NUMA_NODE)
    policy = create("static", HOST, settings)
    decision = policy.allocate(policy.start(), container(5000, pod(kata=False)))
    assert decision.refused is not None
    assert decision.refused.kind is RefusalKind.ALIGNMENT
    assert "single-numa-node" in decision.refused.message
    assert not decision.refused.strict
    assert policy.candidates(policy.start(), container(5000, pod(kata=False))) == ()


def test_a_host_with_too_many_nodes() -> None:
    """There are 2**n sets of nodes: more than the kubelet takes are refused when it is made."""
    many = Machine.of(server(8))
    assert len(many.nodes) == 16
    with pytest.raises(ConfigError, match="at most 8 NUMA nodes, this host has 16"):
        KubeletChoice(many, StaticOptions(), ManagerPolicy.BEST_EFFORT)
    KubeletChoice(many, StaticOptions())
