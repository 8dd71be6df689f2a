"""A keeper of quiet pCPUs over a double of /proc/irq, with passes that tests make up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.cpuset import CpuSet, HostTopology
from kata_pin.base.placement import Cause, PassOutcome, Report, outcome_of
from kata_pin.base.sandbox import Container
from kata_pin.base.settings import AllowRule
from kata_pin.base.values import QuietLevel
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.options.quiet import keeper, tuner
from kata_pin.options.quiet.claims import PodFacts
from kata_pin.options.quiet.keeper import QuietKeeper
from kata_pin.options.quiet.tuner import Tunables
from kata_pin.options.quiet.values import TunableKey, TunableRecord
from kata_pin.records.database import Database
from kata_pin.records.history import NodeEvents
from kata_pin.service.options import Core
from tests.support import world
from tests.support.at_once import place
from tests.support.irqtree import IrqTree


class Clock:
    """time.monotonic() of the keeper and the tuner; only the test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(keeper, "time", clock)
        monkeypatch.setattr(tuner, "time", clock)


class QuietNode:
    """One node: its tree, its registry, and a keeper that can be killed and started again."""

    def __init__(self, folder: Path, tree: IrqTree, topology: HostTopology) -> None:
        self.tree = tree
        self.whole = topology
        self.database = Database(str(folder / "registry.db"), boot_id="boot")
        self.live = LiveConfig(replace(Config(), quiet=QuietLevel.IRQ))
        self.pods: dict[str, str] = {}
        self.annotations: dict[str, dict[str, str]] = {}
        self.devices: frozenset[str] = frozenset()
        self._keeper: QuietKeeper | None = None
        self.bundles = "/run/containerd/x"
        self.events = NodeEvents()
        self.start()

    @property
    def topology(self) -> HostTopology:
        """The pCPUs that are online now."""
        online = self.whole.present - CpuSet(self.tree.offline)
        cpus = tuple(one for one in self.whole.cpus if one.cpu in online)
        return HostTopology(cpus, online, self.whole.present)

    def start(self) -> None:
        """Start a daemon: what the former one knew is gone, but for the registry."""
        self.stop()
        node = SimpleNamespace(current=lambda: world.node(self.topology))
        core = SimpleNamespace(
            root=self.tree.host,
            node=node,
            live=self.live,
            registry=self.database,
            events=self.events,
            sandboxes=Sandboxes(),
        )
        facts = PodFacts(
            self._containers,
            lambda name, _: self.annotations.get(name, {}),
            lambda _: self.devices,
        )
        self.keeper = self._keeper = QuietKeeper(cast("Core", core), facts)
        for pod in self.pods:
            self.run_pod(pod, self.pods[pod])

    def close(self) -> None:
        """End the daemon, and close the registry."""
        self.stop()
        self.database.close()

    def stop(self) -> None:
        """End the daemon as kill -9 does: it restores nothing."""
        if self._keeper is not None:
            self._keeper.close()

    def _containers(self, name: str) -> tuple[Container, ...]:
        made = world.exclusive(f"c-{name}", self.pods.get(name, "0"))
        return (replace(made, bundle=self.bundles, pod_name=name, pod_namespace="ns"),)

    def run_pod(self, name: str, cpus: str) -> None:
        """Have a pass over a pod with these exclusive pCPUs."""
        self.pods[name] = cpus
        self.keeper.passed(self._outcome(name, cpus))

    def end_pod(self, name: str) -> None:
        """Have a pass find that a pod has ended."""
        self.keeper.ended(self._outcome(name, self.pods.pop(name)))

    def set_level(self, level: QuietLevel) -> None:
        """Reload the configuration."""
        self.live.replace(replace(self.live.now, quiet=level))

    def allow(self) -> None:
        """Let every pod choose by annotation."""
        alloc = replace(self.live.now.alloc, allow=(AllowRule(),))
        self.live.replace(replace(self.live.now, alloc=alloc))

    def round(self) -> None:
        """One round, as after a pass or in an audit."""
        asyncio.run(self.keeper.round())

    def settle(self, clock: Clock) -> None:
        """A round, and another after new pCPUs have waited."""
        self.round()
        clock.now += keeper.NARROW_S + 0.1
        self.round()

    @property
    def records(self) -> Mapping[TunableKey, TunableRecord]:
        """What is stored."""
        return Tunables(self.database).all()

    def _outcome(self, name: str, cpus: str) -> PassOutcome:
        sandbox = replace(world.sandbox(world.exclusive(f"c-{name}", cpus)), id=name)
        threads = world.vcpus(0)
        report = Report(name, tuple(threads), place(sandbox, threads, world.node(self.whole)))
        return outcome_of(sandbox, report, Cause(), released=False)
