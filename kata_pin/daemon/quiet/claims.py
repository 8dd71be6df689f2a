"""Which exclusive pCPUs should be quiet, as the last passes left their sandboxes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kata_pin.daemon.live_config import LiveConfig
from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.pass_outcome import RELEASED, PassOutcome
from kata_pin.model.quiet.tunables import QuietClaim
from kata_pin.model.sandbox import Container
from kata_pin.model.settings import QuietLevel
from kata_pin.model.topology import HostTopology
from kata_pin.policy.quiet.annotations import QuietWish, is_allowed, quiet_part, wish

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
    """Takes the outcomes of passes."""

    _live: LiveConfig
    _facts: PodFacts
    _placed: dict[str, _Placed] = field(default_factory=dict)
    _told: set[tuple[str, str]] = field(default_factory=set)

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
        self._told = {one for one in self._told if one[0] != sandbox_id}
        before = self._placed.pop(sandbox_id, None)
        return before is not None and bool(before.exclusive)

    def all(self, topology: HostTopology, *, vfio: bool) -> tuple[QuietClaim, ...]:
        """Return what should be quiet now; with `vfio` also which devices sandboxes have."""
        if not self._live.now.quiet.acts:
            return ()
        return tuple(
            claim
            for sandbox_id, placed in self._placed.items()
            if placed.exclusive
            for claim in self._of(sandbox_id, placed, topology, vfio=vfio)
        )

    def _of(
        self, sandbox_id: str, placed: _Placed, topology: HostTopology, *, vfio: bool
    ) -> Iterator[QuietClaim]:
        containers = self._facts.containers(sandbox_id)
        annotations = self._facts.annotations(sandbox_id, containers)
        quiet, full, crio = EMPTY, EMPTY, EMPTY
        for container_id, cpus in placed.exclusive.items():
            record = next((one for one in containers if one.id == container_id), None)
            found = self._wish(annotations, record)
            self._tell(sandbox_id, found)
            part = quiet_part(cpus, topology, found)
            quiet |= part
            full |= part if found.level is QuietLevel.FULL else EMPTY
            crio |= part if found.crio and record is not None and _CRIO in record.bundle else EMPTY
        if quiet:
            own = union(placed.exclusive.values())
            devices = self._facts.devices(placed.vmm) if vfio else frozenset()
            yield QuietClaim(sandbox_id, quiet, full, crio, own, devices)

    def _wish(self, annotations: Mapping[str, str], record: Container | None) -> QuietWish:
        config = self._live.now
        namespace, handler = (record.pod_namespace, record.handler) if record else ("", "")
        return wish(
            annotations,
            record.name if record else "",
            level=config.quiet,
            pods=config.quiet_pods,
            allowed=is_allowed(config.alloc.allow, namespace, handler),
        )

    def _tell(self, sandbox_id: str, found: QuietWish) -> None:
        """Log once why a pod does not get what its annotation asks for."""
        if found.problem and (sandbox_id, found.problem) not in self._told:
            self._told.add((sandbox_id, found.problem))
            log.warning("sandbox %s: %s", sandbox_id, found.problem)
