"""Acts on changes of the files that decide cpusets: reads them again, and marks sandboxes (D1).

A write of a sandbox's Kata state asks for a pass even if nothing in it is new: Kata sets affinities
and cpusets of its own then (D13). Nothing depends on events: audits call `look_around` and `rearm`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kata_pin.daemon.intake.kata_state import Adoption
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.ports import Observer
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.reconcile.survey import PATIENCE_S, Survey
from kata_pin.daemon.store.containers import Registry
from kata_pin.errors import HostError, reason_of
from kata_pin.host.cpuset import cpuset_folders
from kata_pin.model.count_noun import count
from kata_pin.model.pass_outcome import PassOutcome
from kata_pin.policy.placement.checkpoint_changes import touched
from kata_pin.sources.state_watch import Changes, StateWatch
from kata_pin.sources.uevents import cpu_changes

log = logging.getLogger(__name__)

SPACING_S: Final = 0.02
"""Least time between two reads of one sandbox's state, however often it is written."""

MAX_RECENT: Final = 4096
"""Sandboxes whose last read is remembered."""

CPUSETS_FOLLOW_S: Final = (0.05, 0.5)
"""Passes after a CPU went on- or offline: Linux updates cpusets and affinities later."""

KATA: Final = "Kata's state"
KUBELET: Final = "the kubelet's checkpoint"
CLAIMS: Final = "DRA claims"
CPUSET: Final = "a written cpuset"
NODE: Final = "the node changed"
LOST: Final = "events of files were lost"


@dataclass
class CgroupWatch(Observer):
    """Watches the cpusets of the cgroups that sandboxes' threads are in."""

    _node: NodeWatch
    _watch: StateWatch
    _known: dict[str, frozenset[str]] = field(default_factory=dict)

    def passed(self, outcome: PassOutcome) -> None:
        """Watch the cgroups that a pass saw threads in, and those above them."""
        cgroups = frozenset(thread.task.cgroup for thread in outcome.report.threads)
        if cgroups != self._known.get(outcome.sandbox_id):
            self._known[outcome.sandbox_id] = cgroups
            self._watch.watch_cpusets(outcome.sandbox_id, self._folders(cgroups))

    def ended(self, outcome: PassOutcome) -> None:
        """Watch them no longer."""
        self._known.pop(outcome.sandbox_id, None)
        self._watch.watch_cpusets(outcome.sandbox_id, ())

    def _folders(self, cgroups: Iterable[str]) -> list[str]:
        mounts = self._node.cgroup_mounts
        found = (one for cgroup in sorted(cgroups) for one in cpuset_folders(mounts, cgroup))
        return list(dict.fromkeys(found))


@dataclass
class FileEvents:
    """Acts on what a StateWatch reports."""

    _node: NodeWatch
    _registry: Registry
    _adoption: Adoption
    _sandboxes: Sandboxes
    _watch: StateWatch
    _survey: Survey
    _recent: dict[str, float] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)
    _looks: list[asyncio.TimerHandle] = field(default_factory=list)
    _retry: asyncio.TimerHandle | None = None
    _began: bool = False

    def __post_init__(self) -> None:
        self._kubelet = self._node.kubelet
        self._node.changed()  # the present state is no change

    async def follow(self) -> None:
        """Act on changes until cancelled."""
        async for changes in self._watch.changes():
            unknown = set(changes.sandboxes) - self._sandboxes.vmms.keys()
            if unknown or changes.everything:
                await self._survey.all(patience_s=PATIENCE_S)
                self._survey.afterwards(partial(self._take_surveyed, unknown))
            with left_to_audits():
                self._take(changes)
            await asyncio.sleep(0)

    async def follow_cpus(self) -> None:
        """Ask for passes when CPUs go on- or offline; returns if the kernel sends no events."""
        try:
            async for _ in cpu_changes():
                with left_to_audits():
                    self._take_cpus()
        except HostError as error:
            log.warning("CPU hotplug is noticed only by audits: %s", error)

    def look_around(self) -> None:
        """Record what Kata keeps of every sandbox that runs, unknown ones too."""
        for sandbox_id, new in self._adoption.all(self._sandboxes.vmms).items():
            if new or self._sandboxes.cache(sandbox_id) is None:
                self._adopted(sandbox_id, new)

    def take_recorded(self, sandbox_id: str) -> int:
        """Record what Kata keeps of a sandbox that runs; return the ticket of a pass over it."""
        with left_to_audits():
            self._adoption.one(sandbox_id)
        return self._sandboxes.mark(sandbox_id, "start")

    def vmm_started(self) -> None:
        """Take in a sandbox that is only starting: nothing of Kata's says anything of it yet.

        A process that does not answer now may be the VMM, so it is asked again when it is due.
        """
        self._survey.begin()
        self._survey.afterwards(self._look_again)

    def _look_again(self) -> None:
        with left_to_audits():
            self.look_around()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        wait_s = self._survey.retry_s
        if wait_s is not None:
            self._retry = asyncio.get_running_loop().call_later(wait_s, self.vmm_started)

    def look_at_node(self) -> None:
        """Ask for passes if the node changed unnoticed, or the last ones failed; for audits."""
        if self._node.changed():
            self._sandboxes.mark_all(NODE)
        for sandbox_id in self._sandboxes.without_vmm:
            self._sandboxes.mark(sandbox_id, "still without a VMM", event=False)
        for sandbox_id in self._sandboxes.failed:
            self._sandboxes.mark(sandbox_id, "the last pass failed", event=False)

    def rearm(self) -> None:
        """Watch again what a lost event may have hidden; for audits."""
        self._watch.rearm()

    def _take(self, changes: Changes) -> None:
        if changes.everything:
            self._look_at_everything()
            return
        self._take_states(changes.sandboxes)
        for sandbox_id in changes.cpusets:
            if self._sandboxes.cache(sandbox_id) is not None:  # it may be over by now
                self._sandboxes.mark(sandbox_id, CPUSET, event=False)
        if changes.kubelet:
            self._take_checkpoint()
        if changes.claims and self._node.read_claims():
            self._sandboxes.mark_all(CLAIMS)

    def _look_at_everything(self) -> None:
        """Look at everything: watching began, or events were lost.

        At the start passes are due anyway, and see what was written before them.
        """
        self.look_around()
        self._take_checkpoint()
        self._node.read_claims()
        if self._began:
            self._sandboxes.mark_all(LOST)
        self._began = True

    def _take_states(self, sandbox_ids: Collection[str]) -> None:
        """Read the state of these sandboxes now, or a little later if it was read just now."""
        now = time.monotonic()
        loop = asyncio.get_running_loop()
        due = []
        for sandbox_id in sandbox_ids:
            wait_s = self._recent.get(sandbox_id, 0.0) + SPACING_S - now
            if wait_s <= 0:
                due.append(sandbox_id)
            elif sandbox_id not in self._waiting:
                self._waiting.add(sandbox_id)
                loop.call_later(wait_s, self._take_late, sandbox_id)
        self._read(due)

    def _take_surveyed(self, unknown: Collection[str]) -> None:
        """Look again for VMMs that could not be read in time."""
        with left_to_audits():
            self._read(unknown)
            self.look_around()

    def _take_late(self, sandbox_id: str) -> None:
        self._waiting.discard(sandbox_id)
        with left_to_audits():
            self._read([sandbox_id])

    def _read(self, sandbox_ids: Collection[str]) -> None:
        """Record the state of those that have a VMM, known or found in one look at processes."""
        vmms = self._sandboxes.vmms
        running: Collection[str] = vmms
        if any(one not in vmms for one in sandbox_ids):
            running = self._adoption.running(vmms)
        if len(self._recent) > MAX_RECENT:
            self._recent.clear()
        for sandbox_id in sandbox_ids:
            self._recent[sandbox_id] = time.monotonic()
            if sandbox_id in running:
                self._adopted(sandbox_id, self._adoption.one(sandbox_id))
            elif self._sandboxes.cache(sandbox_id) is not None:
                self._sandboxes.mark(sandbox_id, KATA)

    def _adopted(self, sandbox_id: str, new: int) -> None:
        if new:
            what = count(new, "container")
            log.info("sandbox %s: %s updated from Kata's state", sandbox_id, what)
        self._sandboxes.mark(sandbox_id, KATA)

    def _take_checkpoint(self) -> None:
        """Mark what a changed checkpoint is about: its pods before the others."""
        before, now = self._kubelet, self._node.kubelet
        if before == now:
            return
        self._kubelet = now
        pods, everybody = touched(before, now)
        log.info("kubelet checkpoint changed for %s", count(len(pods), "pod"))
        for sandbox_id in self._sandboxes.ids:
            if self._is_of(sandbox_id, pods):
                self._sandboxes.mark(sandbox_id, KUBELET)
        if everybody:
            self._sandboxes.mark_all(KUBELET)

    def _take_cpus(self) -> None:
        """Mark all, and once more when cpusets have followed.

        Also if the online CPUs are the same: a CPU that went and came back lost its threads.
        """
        if self._node.changed():
            log.info("online CPUs changed to %s", self._node.current().topology.online)
        self._sandboxes.mark_all(NODE)
        for look in self._looks:
            look.cancel()
        loop = asyncio.get_running_loop()
        self._looks = [
            loop.call_later(wait_s, self._sandboxes.mark_all, NODE) for wait_s in CPUSETS_FOLLOW_S
        ]

    def _is_of(self, sandbox_id: str, pods: Collection[str]) -> bool:
        return any(one.pod_uid in pods for one in self._registry.containers(sandbox_id))


@contextlib.contextmanager
def left_to_audits() -> Iterator[None]:
    """Log a change that cannot be handled now: the next audit looks again."""
    try:
        yield
    except Exception as error:  # a fault barrier: one sandbox's files must not stop the others
        log.error("cannot handle a change now, the next audit will: %s", reason_of(error))
        log.debug("cannot handle a change", exc_info=True)
