"""What explain says of a pair's neighbourhood."""

from __future__ import annotations

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.sandbox import GuestTopology
from kata_pin.placement.notes import localities
from tests.support.at_once import place
from tests.support.world import exclusive, node, sandbox, smt_host, vcpus


def told(guest: GuestTopology, cpus: str, *indexes: int) -> list[str]:
    """Return what is said of each of these vCPUs; CPU n and n + 8 are a core, 4-7 on node 1."""
    pod, threads, at = (
        sandbox(exclusive("app", cpus), guest=guest),
        vcpus(*indexes),
        node(smt_host()),
    )
    said = localities(threads, place(pod, threads, at), guest, at.topology)
    return [said.get(thread.key, "") for thread in threads]


def test_plain_guest_says_nothing() -> None:
    """Without guest nodes and guest siblings there is nothing to say."""
    assert told(GuestTopology(boot=2, maximum=2, sockets=2), "4-5", 0, 1) == ["", ""]


def test_siblings_on_one_core_and_on_two() -> None:
    """A whole host core serves one guest core; the other one's CPUs are cores apart."""
    guest = GuestTopology(boot=4, maximum=4, cores=2, threads=2)
    assert told(guest, "1,2,10,3", 0, 1, 2, 3) == [
        "thread sibling of vCPU 1, on the same core",
        "thread sibling of vCPU 0, on the same core",
        "thread sibling of vCPU 3, on another core",
        "thread sibling of vCPU 2, on another core",
    ]


def test_memory_near_and_far() -> None:
    """A vCPU on the node of its memory, and one for which no exclusive CPU is left there."""
    guest = GuestTopology(
        boot=2, maximum=2, sockets=2, numa={0: 0, 1: 1}, host_nodes={0: CpuSet([1]), 1: CpuSet([1])}
    )
    assert sorted(told(guest, "3,4", 0, 1)) == [
        "on host NUMA node 0, its memory is on 1",
        "on host NUMA node 1, where its memory is",
    ]
