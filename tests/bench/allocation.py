"""What a decision of our allocator costs, and what a node looks like after a thousand pods.

Cost: one more container on 2 x 64 cores with SMT, 256 CPUs, half of them given out, and 200 Kata
pods on the others; CPU time of the decision with everything that follows from it, beside one bare
run of the kubelet's algorithm. The churn is simulated (churn.py): the same trace for each policy
and for the kubelet's algorithm.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from kata_pin.base.cpuset import HostTopology
from kata_pin.base.settings import ManagerPolicy
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.choice import choose_cpus
from kata_pin.options.allocation.demand import StaticOptions
from kata_pin.options.allocation.policies import BUILTIN
from tests.bench import churn
from tests.bench.figures import MS, BenchError, Row, in_turns
from tests.bench.node import BenchNode
from tests.support.machines import server

BAR_MS: Final = 5.0
HOSTS: Final = {"2 nodes": 1, "8 nodes": 4}
"""Hosts of 256 CPUs by their NUMA nodes: nodes a package."""

FOLLOWERS: Final = 200
"""Kata pods without CPUs of their own on the half full node; each has a VM too."""

LLC: Final = {"prefer-align-cpus-by-uncorecache": "true"}
SINGLE: Final = ManagerPolicy.SINGLE_NUMA_NODE
WHOLE: Final = {"full-pcpus-only": "true"}


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the rows of single decisions, then those of the churn. Needs no VM."""
    del node
    for title, nodes in HOSTS.items():
        topology = server(nodes)
        for name in BUILTIN:
            yield _decision(name, title, topology, rounds)
    for title, nodes in HOSTS.items():
        topology = server(nodes)
        yield from _churn(title, topology)
        yield from _devices(title, topology)


def _decision(name: str, title: str, topology: HostTopology, rounds: int) -> Row:
    """Return what one allocation costs on a node that is half full."""
    ours = churn.Ours(name, topology)
    for number in range(FOLLOWERS):
        ours.share(f"shared{number}")
    chance = random.Random(1)
    pods = iter(churn.trace(pods=churn.PODS))
    while len(ours.state.exclusive) < 128:
        ours.come(next(pods))
    half = ours.state
    machine = Machine.of(topology)
    free = half.shared - half.reserved

    def decide() -> float:
        pod = churn.TracePod("more", 0, (chance.choice(churn.SIZES),))
        (request,) = churn.requests(pod)
        return _cpu_s(lambda: ours.policy.allocate(half, request))

    def bare() -> float:
        size = chance.choice(churn.SIZES)
        return _cpu_s(lambda: choose_cpus(machine, free, size, StaticOptions()))

    decided, floor = in_turns(rounds, decide, bare)
    return Row(
        f"allocate, 256 CPUs half full, {title}: {name}",
        decided.median * MS,
        "ms",
        rounds,
        floor=floor.median * MS,
        ratio=decided.median / floor.median,
        bar=BAR_MS,
        bar_on_ratio=False,
        detail=f"CPU time; {decided.spread}",
    )


def _churn(title: str, topology: HostTopology) -> Iterator[Row]:
    """Yield what each allocator makes of the trace."""
    allocators: dict[str, Callable[[], churn.Allocator]] = {
        "kubelet": lambda: churn.Kubelet(topology, _kubelet()),
        "kubelet, uncore caches": lambda: churn.Kubelet(topology, _kubelet(**LLC)),
        "kubelet, single NUMA node": lambda: churn.Kubelet(topology, _kubelet(), SINGLE),
        **{name: partial(churn.Ours, name, topology) for name in BUILTIN},
        "static, single NUMA node": lambda: churn.Ours("static", topology, manager=SINGLE),
        "static, whole cores": lambda: churn.Ours("static", topology, WHOLE),
    }
    pods = churn.trace()
    for name, make in allocators.items():
        start = time.process_time()
        look = churn.run(make(), topology, pods)
        if look.containers == 0:
            raise BenchError(f"{name} served no pod of the trace")
        yield _seen(f"1,000 pods, {title}: {name}", look, time.process_time() - start)


def _devices(title: str, topology: HostTopology) -> Iterator[Row]:
    """Yield how far containers are from their devices, by policies that do and do not look."""
    pods = churn.with_devices(churn.trace(), len(topology.nodes))
    for name in ("static", "topology"):
        look = churn.run(churn.Ours(name, topology), topology, pods)
        yield Row(
            f"1,000 pods with devices, {title}: {name}",
            look.far,
            "% far from their device",
            look.with_device,
            detail=(
                f"containers across nodes {look.numa:.1f} %, pods across nodes {look.apart:.1f} %, "
                f"scattered free CPUs {look.fragmentation:.1f} %, {look.refused} refused, "
                f"{look.full:.0f} % full"
            ),
        )


def _seen(name: str, look: churn.Look, seconds: float) -> Row:
    return Row(
        name,
        look.numa,
        "% cross NUMA",
        look.pods,
        detail=(
            f"pods across nodes {look.apart:.1f} %, containers across caches {look.caches:.1f} %, "
            f"cores of two pods {look.neighbours:.1f} %, scattered free CPUs "
            f"{look.fragmentation:.1f} %, {look.refused} refused, {look.full:.0f} % full, "
            f"{seconds:.1f} s"
        ),
    )


def _kubelet(**options: str) -> StaticOptions:
    return StaticOptions.parse({"strict-cpu-reservation": "true", **options})


def _cpu_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
