"""CPUs near a container's devices: only `topology`, where the kernel knows the devices' nodes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import AttachedDevice, ContainerRequest, Grant
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology
from kata_pin.base.settings import Eligibility
from kata_pin.options.allocation.policies import create
from kata_pin.options.allocation.pooled import node_cpus
from tests.support.machines import Shape, host
from tests.support.podspecs import container, pod

HOST = replace(host(Shape(uppers=2, llcs=2, cores=2).cpus()), distances={0: (10, 21), 1: (21, 10)})
"""16 CPUs: node 0 has 0-3,8-11 in two caches, node 1 has 4-7,12-15."""

ZERO, ONE = CpuSet.parse("0-3,8-11"), CpuSet.parse("4-7,12-15")
OPEN = Alloc(eligibility=Eligibility.RELAXED)
CARD = AttachedDevice("/dev/vfio/12", "0000:3b:00.1", 1)
DISK = AttachedDevice("/dev/nvme0n1", "0000:01:00.0", 0)
FUSE = AttachedDevice("/dev/fuse")


def asking(*devices: AttachedDevice, millis: int = 2000, name: str = "app") -> ContainerRequest:
    return replace(container(millis, pod("a"), name), devices=devices)


def granted(
    request: ContainerRequest,
    *before: ContainerRequest,
    policy: str = "topology",
    taken: CpuSet = EMPTY,
    topology: HostTopology = HOST,
) -> Grant:
    """Return the grant of a new container on a node with these others."""
    asked = create(policy, topology, OPEN)
    state = replace(asked.start(), taken=taken)
    for other in before:
        state = asked.allocate(state, other).state
    grant = asked.allocate(state, request).state.get(request.container_id)
    assert grant is not None
    return grant


def test_on_the_node_of_a_device() -> None:
    """Without the device it would have the lowest CPUs; the reason names device and node."""
    assert granted(asking()).exclusive <= ZERO
    near = granted(asking(CARD))
    assert near.exclusive <= ONE
    assert "near 0000:3b:00.1 (NUMA node 1)" in near.reasons
    assert granted(asking(CARD, millis=8000)).exclusive == ONE


@pytest.mark.parametrize("policy", ["static", "annotation"])
def test_the_kubelets_algorithms_do_not_look(policy: str) -> None:
    """They choose what the kubelet would, and claim nothing of devices."""
    grant = granted(asking(CARD), policy=policy)
    assert grant.cpus & ZERO
    assert not any("3b:00.1" in reason for reason in grant.reasons)


def test_a_device_without_a_node_changes_nothing() -> None:
    """It is told apart from one with a node."""
    grant = granted(asking(FUSE))
    assert grant.exclusive == granted(asking()).exclusive
    assert "no NUMA node is known for /dev/fuse" in grant.reasons
    both = granted(asking(FUSE, CARD))
    assert both.exclusive <= ONE
    assert {"no NUMA node is known for /dev/fuse", "near 0000:3b:00.1 (NUMA node 1)"} <= {
        *both.reasons
    }


def test_devices_of_two_nodes() -> None:
    """One node of them serves, and the other one is not near."""
    reasons = " ".join(granted(asking(CARD, DISK)).reasons)
    assert "not near 0000:3b:00.1 (NUMA node 1)" in reasons
    assert reasons.count("near 0000:01:00.0 (NUMA node 0)") == 1
    wide = " ".join(granted(asking(CARD, DISK, millis=10_000)).reasons)
    assert "partly near 0000:3b:00.1 (NUMA node 1)" in wide


def test_too_few_cpus_there() -> None:
    """A container is rather on one node than on the device's and another one."""
    grant = granted(asking(CARD, millis=4000), taken=CpuSet.parse("5-7,12-14"))
    assert grant.exclusive <= ZERO
    assert "not near 0000:3b:00.1 (NUMA node 1)" in grant.reasons


def test_a_device_counts_before_the_pod() -> None:
    """Among its node's CPUs, those beside the pod's come first."""
    first = asking(name="first")
    assert granted(asking(name="more"), first).exclusive <= ZERO
    assert granted(asking(CARD, name="more"), first).exclusive <= ONE
    sidecar = asking(CARD, name="first", millis=1000)
    (core,) = [cpus for cpus in HOST.cores.values() if granted(sidecar).exclusive <= cpus]
    assert granted(asking(CARD, name="more", millis=1000), sidecar).exclusive <= core


def test_a_container_of_the_shared_pool() -> None:
    """It uses the pool's CPUs on the device's node; without a request the whole pool."""
    part = granted(asking(CARD, millis=500))
    assert part.zone == part.shared == ONE
    assert "near 0000:3b:00.1 (NUMA node 1)" in part.reasons
    whole = granted(asking(CARD, millis=0))
    assert "partly near 0000:3b:00.1 (NUMA node 1)" in whole.reasons


def test_many_devices_are_named_in_part() -> None:
    """A line of an explanation stays one."""
    cards = tuple(replace(CARD, address=f"0000:3b:00.{n}") for n in range(6))
    (reason,) = (one for one in granted(asking(*cards)).reasons if "3b" in one)
    assert reason.endswith("0000:3b:00.3 and 2 more (NUMA node 1)")


def test_one_node_is_no_choice() -> None:
    """Nothing is said where every CPU is as near."""
    grant = granted(asking(CARD, FUSE), topology=host(Shape(cores=4).cpus()))
    assert not any("NUMA" in reason for reason in grant.reasons)


def test_a_node_without_cpus() -> None:
    """Memory alone, or CPUs that are offline: the nearest node's CPUs count."""
    assert node_cpus(HOST, 1) == ONE
    assert node_cpus(HOST, 7) == node_cpus(HOST, -1) == EMPTY
    far = {0: (10, 21, 31), 1: (21, 10, 17), 2: (31, 17, 10)}
    third = replace(HOST, distances=far)
    assert node_cpus(third, 2) == ONE
    assert granted(asking(replace(CARD, node=2)), topology=third).exclusive <= ONE
