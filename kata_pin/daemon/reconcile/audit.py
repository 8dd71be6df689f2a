"""The audits: nothing depends on an event having arrived (DESIGN D1).

The affinity audit lists each process's threads and asks the kernel for their affinities, nothing
more while they are right. The deep audit also compares identities and cpusets. What they find only
marks a sandbox for a pass. Out of scope: finding sandboxes that nobody told us about (app.py does
after a deep audit).

Lifetime: the daemon's; what is expected is derived from each sandbox's last report, once a report.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kata_pin.daemon.journal import DRIFT_FOUND, about
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.errors import TaskGone
from kata_pin.host.audit import Expected, Finding, audit_affinity, audit_deep
from kata_pin.host.cpuset import CpusetReader
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import as_numbers
from kata_pin.model.placement import Report
from kata_pin.model.thread import Task, ThreadKey, ThreadRole

log = logging.getLogger(__name__)

YIELD_EVERY: Final = 16
"""Sandboxes between two chances for the event loop to serve a hook: about 2 ms."""


@dataclass(frozen=True)
class Expectation:
    """What a report left behind, by process: each thread's birth and affinity."""

    report: Report
    threads: dict[int, dict[int, Expected]]
    affinities: dict[int, dict[int, frozenset[int]]]
    members: tuple[Task, ...]
    """One thread of each cgroup, to see whether that cgroup's cpuset changed, and every vCPU
    thread: they alone are moved one by one (by Kata on cgroup v1, and into threaded cgroups)."""

    @classmethod
    def of(cls, report: Report) -> Expectation:
        """Derive it from a report."""
        threads: dict[int, dict[int, Expected]] = {}
        members: dict[str | int, Task] = {}
        for thread in report.threads:
            task = thread.task
            expected = Expected(task.key.starttime, as_numbers(task.affinity))
            threads.setdefault(task.key.tgid, {})[task.key.tid] = expected
            is_vcpu = thread.role.role is ThreadRole.VCPU
            members.setdefault(task.key.tid if is_vcpu else task.cgroup, task)
        affinities = {
            tgid: {tid: one.affinity for tid, one in tids.items()} for tgid, tids in threads.items()
        }
        return cls(report, threads, affinities, tuple(members.values()))


class Auditor:
    """Compares the kernel with what the last passes left, and marks what differs."""

    def __init__(self, root: HostRoot, sandboxes: Sandboxes) -> None:
        self._root = root
        self._sandboxes = sandboxes
        self._expected: dict[str, Expectation] = {}

    async def affinity(self) -> int:
        """Run an affinity audit; return how many sandboxes were marked."""
        return await self._round(self._look_at_affinities)

    async def deep(self) -> int:
        """Run a deep audit; return how many sandboxes were marked."""
        cpusets = CpusetReader(self._root)
        return await self._round(lambda expected: self._look_deep(expected, cpusets))

    async def _round(self, look: Look) -> int:
        marked = 0
        ids = self._sandboxes.ids
        self._expected = {one: self._expected[one] for one in ids if one in self._expected}
        for number, sandbox_id in enumerate(ids, start=1):
            cache = self._sandboxes.cache(sandbox_id)
            if cache is not None and cache.report is not None:
                marked += self._judge(sandbox_id, cache, cache.report, look)
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        return marked

    def _judge(self, sandbox_id: str, cache: SandboxCache, report: Report, look: Look) -> bool:
        """Look at one sandbox; mark it when something differs."""
        expected = self._expected.get(sandbox_id)
        if expected is None or expected.report is not report:
            expected = self._expected[sandbox_id] = Expectation.of(report)
        findings, shrunk = look(expected)
        back_off_ended = cache.other_writers.ended(time.monotonic())
        if not findings and not shrunk and not back_off_ended:
            cache.checked_at = time.monotonic()
            return False
        moved = [
            ThreadKey(tgid, tid, expected.threads[tgid][tid].starttime)
            for tgid, finding in findings.items()
            for tid in finding.moved
        ]
        if not shrunk:  # a cpuset that changed moves threads by itself
            cache.other_writers.drifted(moved, time.monotonic())
        told = _told(findings, shrunk=shrunk) or "the back-off from another writer ended"
        drift = about(DRIFT_FOUND, source="audit")
        log.info("sandbox %s: audit found %s", sandbox_id, told, extra=drift)
        self._sandboxes.mark(sandbox_id, "audit", event=False)
        return True

    def _look_at_affinities(self, expected: Expectation) -> tuple[dict[int, Finding], bool]:
        findings = {
            tgid: found
            for tgid, affinities in expected.affinities.items()
            if (found := audit_affinity(self._root, tgid, affinities))
        }
        moved = any(found.moved for found in findings.values())
        return findings, moved and _cpuset_changed(expected, CpusetReader(self._root))

    def _look_deep(
        self, expected: Expectation, cpusets: CpusetReader
    ) -> tuple[dict[int, Finding], bool]:
        findings = {
            tgid: found
            for tgid, threads in expected.threads.items()
            if (found := audit_deep(self._root, tgid, threads))
        }
        return findings, _cpuset_changed(expected, cpusets)


Look = Callable[[Expectation], tuple[dict[int, Finding], bool]]
"""Looks at one sandbox: what was found by process, and whether a cpuset changed."""


def _cpuset_changed(expected: Expectation, cpusets: CpusetReader) -> bool:
    return any(_changed(task, cpusets) for task in expected.members)


def _changed(task: Task, cpusets: CpusetReader) -> bool:
    try:
        return cpusets.of(task.key.tgid, task.key.tid) != (task.cgroup, task.cpuset)
    except TaskGone:
        return True


def _told(findings: dict[int, Finding], *, shrunk: bool) -> str:
    """Say in a few words what an audit found."""
    counts = {
        "moved": sum(len(f.moved) for f in findings.values()),
        "born": sum(len(f.born) for f in findings.values()),
        "gone": sum(len(f.gone) for f in findings.values()),
    }
    parts = [f"{count} threads {word}" for word, count in counts.items() if count]
    return ", ".join([*parts, *(["a changed cpuset"] if shrunk else [])])
