"""An allocator of a host made here, over a real registry: for tests of what it does with events."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import replace

from kata_pin.base.allocation import ContainerRequest, PodRequest
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.cpuset import HostTopology
from kata_pin.base.placement import KubeletState, Node, PassOutcome
from kata_pin.base.settings import AllowRule, Eligibility, PlacementSettings
from kata_pin.base.values import CpuClass
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.linux.files import HOST
from kata_pin.options.allocation.allocator import Allocator
from kata_pin.options.allocation.grants import PendingPasses
from kata_pin.placement.masks import vm_of
from kata_pin.records.containers import Registry
from kata_pin.records.history import NodeEvents
from kata_pin.service.options import Core
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


def core(registry: Registry, host: Host, **fields: Any) -> Core:
    """Return what an allocator takes of the core, with these settings."""
    parts = SimpleNamespace(
        live=LiveConfig(Config(alloc=settings(**fields))),
        node=host,
        root=HOST,
        registry=registry,
        events=NodeEvents(registry),
        kata_pinning=SimpleNamespace(hot_plug=False),
        sandboxes=SimpleNamespace(known_vmm=lambda _: None),
    )
    return cast("Core", parts)


def looking(registry: Registry, host: Host, **fields: Any) -> Allocator:
    """Return an allocator that decides nothing, as a command without a daemon has it."""
    return Allocator(core(registry, host, **fields), None)


def allocator(
    registry: Registry, host: Host, passes: PendingPasses | None = None, **fields: Any
) -> Allocator:
    """Return an allocator at work, in line with its host."""
    one = Allocator(core(registry, host, **fields), passes or Moves())
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
