"""The audits: drift is found even if no event reports it (D1).

The affinity audit lists each process's threads and reads their affinities. The deep audit also
compares start times and cpusets. What they find only marks a sandbox for a pass.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from msgspec import Struct

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import HostError, TaskGone
from kata_pin.base.placement import Placement, Report
from kata_pin.base.sandbox import Task
from kata_pin.base.steps import Steps
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import ThreadRole, count
from kata_pin.engine.counters import Slices
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.linux.affinity import (
    ExpectedThread,
    audit_affinity,
    audit_deep,
)
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HostRoot
from kata_pin.linux.tasks import CROWD, as_numbers, get_affinity
from kata_pin.records.history import DRIFT_FOUND, about

log = logging.getLogger(__name__)


class Expectation(Struct):
    """What a report expects to find: each thread's affinity, by process, and more on demand."""

    report: Report
    affinities: tuple[tuple[int, dict[int, frozenset[int]]], ...]
    members: tuple[Task, ...]
    """One thread of each cgroup, to see whether that cgroup's cpuset changed, and every vCPU
    thread: they alone are moved one by one (by Kata on cgroup v1, and into threaded cgroups)."""

    counted: frozenset[ThreadKey] = frozenset()
    """Threads found moved since this report: one move, until the next pass."""

    @classmethod
    def of(cls, report: Report) -> Expectation:
        """Derive it from a report."""
        affinities: dict[int, dict[int, frozenset[int]]] = {}
        members: dict[str | int, Task] = {}
        for task, role in report.threads:
            tgid, tid, _ = task.key
            affinities.setdefault(tgid, {})[tid] = as_numbers(task.affinity)
            is_vcpu = role.role is ThreadRole.VCPU
            members.setdefault(tid if is_vcpu else task.cgroup, task)
        return cls(report, tuple(affinities.items()), tuple(members.values()))

    def threads(self) -> dict[int, dict[ThreadKey, ExpectedThread]]:
        """Return what a deep audit expects of each process's threads; not kept, for its size."""
        found: dict[int, dict[ThreadKey, ExpectedThread]] = {}
        for task, _role in self.report.threads:
            tgid, _tid, starttime = task.key
            expected = ExpectedThread(starttime, as_numbers(task.affinity))
            found.setdefault(tgid, {})[task.key] = expected
        return found


class AuditResult(NamedTuple):
    """What was found of one sandbox: `shrunk` says whether a cpuset changed."""

    moved: list[ThreadKey]
    born: int
    gone: int
    shrunk: bool

    def __str__(self) -> str:
        """Return it in a few words."""
        numbers = {"moved": len(self.moved), "new": self.born, "gone": self.gone}
        parts = [f"{count(number, 'thread')} {word}" for word, number in numbers.items() if number]
        return ", ".join([*parts, *(["cpuset changed"] if self.shrunk else [])])


class Auditor:
    """Compares the kernel with what the last passes left, and marks what differs."""

    def __init__(self, root: HostRoot, sandboxes: Sandboxes) -> None:
        self._root = root
        self._sandboxes = sandboxes
        self._expected: dict[str, Expectation] = {}

    async def affinity(self) -> int:
        """Run an affinity audit; return how many sandboxes were marked."""
        return await self._round(None)

    async def deep(self) -> int:
        """Run a deep audit; return how many sandboxes were marked."""
        return await self._round(CpusetReader(self._root))

    async def _round(self, cpusets: CpusetReader | None) -> int:
        """Check every sandbox, in slices; a pass that runs meanwhile has looked itself."""
        marked, slices = 0, Slices()
        ids = self._sandboxes.ids
        self._expected = {one: self._expected[one] for one in ids if one in self._expected}
        for sandbox_id in ids:
            cache = self._sandboxes.cache(sandbox_id)
            if cache is None or cache.report is None or cache.passing:
                continue
            report = cache.report
            expected = self._expected.get(sandbox_id)
            if expected is None or expected.report is not report:
                expected = self._expected[sandbox_id] = Expectation.of(report)
            found = await slices.run(self._check(expected, cache, cpusets))
            await slices.breathe()
            if cache.report is report and not cache.passing:
                marked += self._judge(sandbox_id, cache, expected, found)
        return marked

    def _judge(
        self, sandbox_id: str, cache: SandboxCache, expected: Expectation, found: AuditResult
    ) -> bool:
        """Mark a sandbox if an audit found that something differs."""
        back_off_ended = cache.other_writers.ended(time.monotonic())
        if not any(found) and not back_off_ended:
            cache.checked_at = time.monotonic()
            return False
        if not found.shrunk:  # a cpuset that changed moves threads by itself
            fresh = [key for key in found.moved if key not in expected.counted]
            cache.other_writers.drifted(fresh, time.monotonic())
            expected.counted = expected.counted.union(fresh)
        what = str(found) or "back-off ended, re-applying affinities"
        drift = about(DRIFT_FOUND, source="audit")
        log.info("sandbox %s: audit: %s", sandbox_id, what, extra=drift)
        self._sandboxes.mark(sandbox_id, "audit", event=False)
        return True

    def _check(
        self, expected: Expectation, cache: SandboxCache, cpusets: CpusetReader | None
    ) -> Steps[AuditResult]:
        """Compare a sandbox with what is expected: by `cpusets` deeply, or only its affinities."""
        root, findings = self._root, []
        if cpusets is None:
            for tgid, affinities in expected.affinities:
                findings.append((tgid, (yield from audit_affinity(root, tgid, affinities))))
        else:
            for tgid, threads in expected.threads().items():
                inodes = cache.tasks.inodes(threads)
                by_tid = {key.tid: one for key, one in threads.items()}
                findings.append((tgid, (yield from audit_deep(root, tgid, by_tid, inodes))))
        off = {(tgid, tid) for tgid, finding in findings for tid in finding.moved}
        moved = (
            [t.key for t in expected.report.threads if (t.key.tgid, t.key.tid) in off]
            if off
            else []
        )
        shrunk = (cpusets is not None or bool(moved)) and _cpuset_changed(
            expected, cpusets or CpusetReader(root)
        )
        if not shrunk:  # one that has a part of its CPUs is no drift
            moved = [key for key in moved if not self._is_within(key, expected.report.placement)]
        born = sum(len(finding.born) for _, finding in findings)
        gone = sum(len(finding.gone) for _, finding in findings)
        # threads that no pass looks at are not new
        return AuditResult(moved, 0 if cache.tasks.left_out else born, gone, shrunk)

    def _is_within(self, key: ThreadKey, placement: Placement | None) -> bool:
        desired = placement.desired.get(key) if placement is not None else None
        if desired is None or desired.release:
            return False
        try:
            return get_affinity(key.tid, self._root) <= desired.applied
        except HostError:  # TaskGone is one
            return False


def _cpuset_changed(expected: Expectation, cpusets: CpusetReader) -> bool:
    """Whether a thread is in another cgroup, or its cgroup has other CPUs.

    Of many threads in one cgroup only one is asked: the cgroup's own list has the others.
    """
    lists: dict[tuple[str, CpuSet], frozenset[int]] = {}
    try:
        for task in expected.members:
            tgid, tid, place = task.key.tgid, task.key.tid, (task.cgroup, task.cpuset)
            if tid in lists.get(place, ()):
                continue
            if cpusets.of(tgid, tid) != place:
                return True
            if place not in lists and len(expected.members) >= CROWD:
                lists[place] = cpusets.tids(task.cgroup, among=len(expected.members))
    except TaskGone:
        return True
    return False
