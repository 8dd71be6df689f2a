"""The audits: drift is found even if no event reports it (D1).

The affinity audit lists each process's threads and reads their affinities. The deep audit also
compares start times and cpusets. What they find only marks a sandbox for a pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import HostError, TaskGone
from kata_pin.base.placement import Desired, Report
from kata_pin.base.sandbox import Task, ThreadKey
from kata_pin.base.steps import Steps
from kata_pin.base.values import ThreadRole, count
from kata_pin.engine.counters import Slices
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.linux.affinity import (
    AuditFinding,
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

    def keys(self) -> dict[tuple[int, int], ThreadKey]:
        """Return the identities of its threads, by process and tid."""
        return {(task.key.tgid, task.key.tid): task.key for task, _role in self.report.threads}


class Auditor:
    """Compares the kernel with what the last passes left, and marks what differs."""

    def __init__(self, root: HostRoot, sandboxes: Sandboxes) -> None:
        self._root = root
        self._sandboxes = sandboxes
        self._expected: dict[str, Expectation] = {}

    async def affinity(self) -> int:
        """Run an affinity audit; return how many sandboxes were marked."""
        return await self._round(self._check_affinities)

    async def deep(self) -> int:
        """Run a deep audit; return how many sandboxes were marked."""
        cpusets = CpusetReader(self._root)
        return await self._round(partial(self._check_deep, cpusets))

    async def _round(self, check: Check) -> int:
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
            findings, shrunk = await slices.run(check(expected, cache))
            await slices.breathe()
            if cache.report is report and not cache.passing:
                marked += self._judge(sandbox_id, cache, expected, findings, shrunk=shrunk)
        return marked

    def _judge(
        self,
        sandbox_id: str,
        cache: SandboxCache,
        expected: Expectation,
        findings: dict[int, AuditFinding],
        *,
        shrunk: bool,
    ) -> bool:
        """Mark a sandbox if an audit found that something differs."""
        if cache.tasks.left_out:  # threads that no pass looks at are not new
            old = {tgid: replace(found, born=()) for tgid, found in findings.items()}
            findings = {tgid: found for tgid, found in old.items() if found}
        keys = expected.keys() if findings else {}
        if not shrunk:
            findings = self._without_narrowed(expected, findings, keys)
        back_off_ended = cache.other_writers.ended(time.monotonic())
        if not findings and not shrunk and not back_off_ended:
            cache.checked_at = time.monotonic()
            return False
        moved = [keys[tgid, tid] for tgid, finding in findings.items() for tid in finding.moved]
        if not shrunk:  # a cpuset that changed moves threads by itself
            fresh = [key for key in moved if key not in expected.counted]
            cache.other_writers.drifted(fresh, time.monotonic())
            expected.counted = expected.counted.union(fresh)
        found = _summary(findings, shrunk=shrunk) or "back-off ended, re-applying affinities"
        drift = about(DRIFT_FOUND, source="audit")
        log.info("sandbox %s: audit: %s", sandbox_id, found, extra=drift)
        self._sandboxes.mark(sandbox_id, "audit", event=False)
        return True

    def _without_narrowed(
        self,
        expected: Expectation,
        findings: dict[int, AuditFinding],
        keys: Mapping[tuple[int, int], ThreadKey],
    ) -> dict[int, AuditFinding]:
        """Return the findings without threads that have a part of their CPUs: that is no drift."""
        placement = expected.report.placement
        desired = placement.desired if placement is not None else {}
        found = {}
        for tgid, finding in findings.items():
            moved = tuple(
                tid
                for tid in finding.moved
                if not self._is_within(tid, desired.get(keys[tgid, tid]))
            )
            if left := replace(finding, moved=moved):
                found[tgid] = left
        return found

    def _is_within(self, tid: int, desired: Desired | None) -> bool:
        if desired is None or desired.release:
            return False
        try:
            return get_affinity(tid, self._root) <= desired.applied
        except HostError:  # TaskGone is one
            return False

    def _check_affinities(self, expected: Expectation, _cache: SandboxCache) -> Steps[Found]:
        findings = {}
        for tgid, affinities in expected.affinities:
            found = yield from audit_affinity(self._root, tgid, affinities)
            if found:
                findings[tgid] = found
        moved = any(found.moved for found in findings.values())
        return findings, moved and _cpuset_changed(expected, CpusetReader(self._root))

    def _check_deep(
        self, cpusets: CpusetReader, expected: Expectation, cache: SandboxCache
    ) -> Steps[Found]:
        findings = {}
        for tgid, threads in expected.threads().items():
            inodes = cache.tasks.inodes(threads)
            by_tid = {key.tid: one for key, one in threads.items()}
            found = yield from audit_deep(self._root, tgid, by_tid, inodes)
            if found:
                findings[tgid] = found
        return findings, _cpuset_changed(expected, cpusets)


Found = tuple[dict[int, AuditFinding], bool]
"""What was found of one sandbox, by process, and whether a cpuset changed."""

Check = Callable[[Expectation, SandboxCache], Steps[Found]]


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


def _summary(findings: dict[int, AuditFinding], *, shrunk: bool) -> str:
    """Return in a few words what an audit found."""
    numbers = {
        "moved": sum(len(f.moved) for f in findings.values()),
        "new": sum(len(f.born) for f in findings.values()),
        "gone": sum(len(f.gone) for f in findings.values()),
    }
    parts = [f"{count(number, 'thread')} {word}" for word, number in numbers.items() if number]
    return ", ".join([*parts, *(["cpuset changed"] if shrunk else [])])
