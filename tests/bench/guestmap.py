"""The map of 64 vCPUs: which guest CPU each is, and what each container should use.

Computed after each pass, in the event loop. A bare loop that makes as many frozen values is the
floor: that much any map costs here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kata_pin.base.placement import Report
from kata_pin.base.sandbox import GuestFacts, GuestTopology, Link, Thread, VcpuLink
from kata_pin.base.values import LinkState
from kata_pin.guest.cpus import plan_guest
from kata_pin.guest.map import guest_map
from kata_pin.peers.qemu import apic_id
from tests.bench.figures import Row, in_turns, tail_row, timed
from tests.bench.node import BenchNode
from tests.support.at_once import place
from tests.support.world import exclusive, flat, node, sandbox, shared, vcpus

VCPUS = 64
BAR_MS = 1.0


def measure(_node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the map alone, and all that a pass hands over to a guest's keeper."""
    guest = GuestTopology(boot=1, maximum=VCPUS, sockets=VCPUS)
    containers = [exclusive(f"c{n}", f"{1 + 8 * n}-{8 + 8 * n}") for n in range(7)]
    pod = sandbox(*containers, shared("log", "0"), guest=guest)
    on = f"0-{VCPUS}"
    threads = vcpus(*range(VCPUS), on=on, cpuset=on)
    where = node(flat(VCPUS + 1))
    placement = place(pod, threads, where)
    report = Report(pod.id, tuple(threads), placement)
    facts = GuestFacts("6.18.35")
    alone, whole, floor = in_turns(
        rounds,
        lambda: timed(lambda: guest_map(pod, threads, placement, facts, apic_of=apic_id)),
        lambda: timed(lambda: plan_guest(pod, report, where, facts, machine="x86_64")),
        lambda: timed(lambda: _bare(threads)),
    )
    yield tail_row(f"map of {VCPUS} vCPUs, p99", alone, floor, bar_ms=BAR_MS)
    yield tail_row("the same with each container's guest CPUs, p99", whole, floor)


_LINK = Link(LinkState.PROVEN, "a bare loop")


def _bare(threads: Sequence[Thread]) -> list[VcpuLink]:
    return [VcpuLink(one.key, 0, 0, 0, _LINK, _LINK, _LINK, one.task.affinity) for one in threads]
