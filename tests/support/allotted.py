"""An allocator of a host made here, over a real registry: for tests of what it does with events."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from kata_pin.config.alloc import Alloc
from kata_pin.config.tree import Config
from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.checked_policy import make_policy
from kata_pin.daemon.allocation.holders import Holders
from kata_pin.daemon.allocation.memory_home import MemoryHomes
from kata_pin.daemon.allocation.pending_passes import PendingPasses
from kata_pin.daemon.allocation.placement_files import PlacementFiles
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.grants import AllocStore
from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.model.alloc import ContainerRequest, PodRequest
from kata_pin.model.node import KubeletState, Node
from kata_pin.model.pass_outcome import PassOutcome
from kata_pin.model.settings import AllowRule, CpuClass, Eligibility, PlacementSettings
from kata_pin.model.topology import HostTopology
from kata_pin.policy.alloc.allotment import vm_of
from tests.support.world import flat

ANYBODY = (AllowRule(),)


@dataclass
class Host:
    """What an allocator reads of a node: topology, the kubelet's state, the configuration."""

    topology: HostTopology = field(default_factory=lambda: flat(8))
    kubelet: KubeletState | None = None
    config: Config = field(default_factory=Config)
    settings: PlacementSettings = field(default_factory=PlacementSettings)

    def current(self) -> Node:
        """Return the node."""
        return Node(self.topology, self.settings, self.kubelet)


def settings(**fields: Any) -> Alloc:
    """Return settings under which anybody may choose by annotation."""
    known = {"policy": "annotation", "eligibility": Eligibility.RELAXED, "allow": ANYBODY}
    return Alloc(**(known | fields))


class Moves(PendingPasses):
    """Records which sandboxes move; all are supervised, and no pass over them ends."""

    def __init__(self) -> None:
        super().__init__(cast("Sandboxes", None))
        self.requested: list[tuple[frozenset[str], str]] = []

    def request(self, sandbox_ids: Collection[str], why: str) -> frozenset[str]:
        """Record them."""
        self.requested.append((frozenset(sandbox_ids), why))
        return frozenset()

    def passed(self, outcome: PassOutcome) -> bool:
        """Return that the threads have not left their former CPUs."""
        return False


def looking(registry: Registry, host: Host, **fields: Any) -> Allocator:
    """Return an allocator that decides nothing, as a command without a daemon has it."""
    chosen = settings(**fields)
    make = partial(make_policy, chosen)
    return Allocator(
        chosen,
        cast("NodeWatch", host),
        AllocStore(registry),
        make,
        holders=Holders(registry),
        events=NodeEvents(),
    )


def allocator(
    registry: Registry,
    host: Host,
    passes: PendingPasses | None = None,
    placements: PlacementFiles | None = None,
    memory: MemoryHomes | None = None,
    **fields: Any,
) -> Allocator:
    """Return an allocator at work, in line with its host."""
    chosen = settings(**fields)
    make = partial(make_policy, chosen)
    store = AllocStore(registry)
    one = Allocator(
        chosen,
        cast("NodeWatch", host),
        store,
        make,
        holders=Holders(registry),
        events=NodeEvents(registry),
        passes=passes or Moves(),
        placements=placements,
        memory=memory,
    )
    one.follow_host()
    return one


def request(
    name: str, cpu_class: str = "", *, cpus: int = 0, kata: bool = True, quota: bool = True
) -> ContainerRequest:
    """Return the request of a container of a pod of its own; `cpus` is its limit and request."""
    pod = PodRequest(
        f"uid-{name}",
        "shop",
        name,
        "kata",
        {"cpu-policy.kata-pin.io": cpu_class} if cpu_class else {},
        kata=kata,
        sandbox_id=vm_of(f"s-{name}") if kata else "",
    )
    limit = cpus * 100_000 if quota and cpus else None
    return ContainerRequest(f"c-{name}", pod, "app", cpus * 1000, limit)


def ordered(one: ContainerRequest, cpu_class: CpuClass) -> ContainerRequest:
    """Return a request for which the administrator ordered a class."""
    return replace(one, pod=replace(one.pod, ordered=cpu_class))
