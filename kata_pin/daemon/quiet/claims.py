"""Which exclusive pCPUs should be quiet, as the last passes left their sandboxes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kata_pin.daemon.live_config import LiveConfig
from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.pass_outcome import RELEASED, PassOutcome
from kata_pin.model.quiet.tunables import QuietClaim
from kata_pin.model.sandbox import Container, Sandbox
from kata_pin.model.settings import QuietLevel
from kata_pin.model.topology import HostTopology
from kata_pin.policy.quiet.annotations import (
    PowerWish,
    QuietWish,
    is_allowed,
    power_wish,
    quiet_part,
    wish,
)

log = logging.getLogger(__name__)

_CRIO: str = "/containers/storage/"
"""Part of the bundles' paths of CRI-O."""


@dataclass(frozen=True)
class PodFacts:
    """What is known of pods beside their passes, by sandbox; `devices` takes the VMM's pid."""

    containers: Callable[[str], tuple[Container, ...]]
    annotations: Callable[[str, Iterable[Container]], Mapping[str, str]]
    devices: Callable[[int], frozenset[str]]


@dataclass(frozen=True)
class _Placed:
    """What the last pass left: exclusive pCPUs by container, and the VMM's pid."""

    exclusive: Mapping[str, CpuSet]
    vmm: int


@dataclass
class QuietClaims:
    """Takes the outcomes of passes.

    `problems` are why sandboxes do not get what their annotations ask for, as of the last `all`.
    """

    _live: LiveConfig
    _facts: PodFacts
    _placed: dict[str, _Placed] = field(default_factory=dict)
    problems: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def passed(self, outcome: PassOutcome) -> bool:
        """Take a pass; return whether something changed."""
        decided = outcome.report.placement
        mine: dict[str, CpuSet] = {}
        if decided is not None and decided.desired and outcome.state != RELEASED:
            mine = {one.container_id: one.exclusive for one in decided.mask.claims if one.exclusive}
        pids = {thread.key.tgid for thread in outcome.report.threads}
        before = self._placed.get(outcome.sandbox_id)
        self._placed[outcome.sandbox_id] = _Placed(mine, min(pids, default=0))
        return (before.exclusive if before is not None else {}) != mine

    def ended(self, sandbox_id: str) -> bool:
        """Drop a sandbox; return whether something changed."""
        self.problems.pop(sandbox_id, None)
        before = self._placed.pop(sandbox_id, None)
        return before is not None and bool(before.exclusive)

    def all(self, topology: HostTopology, *, vfio: bool) -> tuple[QuietClaim, ...]:
        """Return what should be quiet now; with `vfio` also which devices sandboxes have."""
        before, self.problems = self.problems, {}
        if not self._live.now.quiet.acts:
            return ()
        found = tuple(
            claim
            for sandbox_id, placed in self._placed.items()
            if placed.exclusive
            for claim in self._of(sandbox_id, placed, topology, vfio=vfio)
        )
        for sandbox_id, problems in self.problems.items():
            pod = Sandbox(sandbox_id, self._facts.containers(sandbox_id), None).pod
            named = f"sandbox {sandbox_id}" + (f", pod {pod}" if pod != sandbox_id else "")
            for one in problems:
                if one not in before.get(sandbox_id, ()):
                    log.warning("%s: %s", named, one)
        return found

    def exclusive(self, sandbox_id: str) -> CpuSet:
        """Return the exclusive pCPUs of a sandbox, as its last pass left it."""
        placed = self._placed.get(sandbox_id)
        return EMPTY if placed is None else union(placed.exclusive.values())

    def _of(
        self, sandbox_id: str, placed: _Placed, topology: HostTopology, *, vfio: bool
    ) -> Iterator[QuietClaim]:
        containers = self._facts.containers(sandbox_id)
        annotations = self._facts.annotations(sandbox_id, containers)
        records = {one.id: one for one in containers if one.id in placed.exclusive}
        from_crio = {one.id for one in records.values() if _CRIO in one.bundle}
        quiet, full, crio = EMPTY, EMPTY, EMPTY
        problems: dict[str, None] = {}
        for container_id, cpus in placed.exclusive.items():
            found = self._wish(annotations, records.get(container_id))
            if found.problem:
                problems[found.problem] = None
            part = quiet_part(cpus, topology, found)
            quiet |= part
            full |= part if found.level is QuietLevel.FULL else EMPTY
            crio |= part if found.crio and container_id in from_crio else EMPTY
        some = next(iter(records.values()), None)
        power = self._power(annotations, some, crio=bool(from_crio))
        if problems or power.problems:
            self.problems[sandbox_id] = (*problems, *power.problems)
        if quiet or power.idle or power.governor:
            own = union(placed.exclusive.values())
            devices = self._facts.devices(placed.vmm) if vfio else frozenset()
            yield QuietClaim(
                sandbox_id, quiet, full, crio, own, devices, power.idle, power.governor,
                bool(from_crio),
            )  # fmt: skip

    def _wish(self, annotations: Mapping[str, str], record: Container | None) -> QuietWish:
        return wish(
            annotations,
            record.name if record else "",
            level=self._live.now.quiet,
            pods=self._live.now.quiet_pods,
            allowed=self._is_allowed(record),
        )

    def _power(
        self, annotations: Mapping[str, str], record: Container | None, *, crio: bool
    ) -> PowerWish:
        level = self._live.now.quiet
        return power_wish(annotations, level=level, allowed=self._is_allowed(record), crio=crio)

    def _is_allowed(self, record: Container | None) -> bool:
        namespace, handler = (record.pod_namespace, record.handler) if record else ("", "")
        return is_allowed(self._live.now.alloc.allow, namespace, handler)
