"""Which pCPUs are watched and whose every thread is, as the last passes left them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.placement import Report
from kata_pin.model.sandbox import Container
from kata_pin.model.sandbox import Sandbox as SandboxFacts
from kata_pin.model.thread import ThreadKey, ThreadRole
from kata_pin.policy.isolation.classes import Known, Owner


class Watched(NamedTuple):
    """A pCPU of a sandbox: its paired vCPU, and the other threads that may run there only.

    Paired by kata-pin, or by Kata itself (D13). `shared`: further threads of the sandbox may run
    there too.
    """

    sandbox: str
    cpu: int
    vcpus: tuple[ThreadKey, ...]
    others: tuple[ThreadKey, ...]
    shared: bool

    @property
    def threads(self) -> tuple[ThreadKey, ...]:
        """All that may run there only."""
        return self.vcpus + self.others


@dataclass(frozen=True)
class _Claim:
    """What one pass over a sandbox left."""

    report: Report
    watched: tuple[Watched, ...]

    @classmethod
    def of(cls, sandbox_id: str, report: Report) -> _Claim:
        paired: dict[int, list[ThreadKey]] = {}
        alone: dict[int, list[ThreadKey]] = {}
        shared = 0
        for key, (cpus, is_paired) in _places(report).items():
            if len(cpus) == 1:
                kind = paired if is_paired else alone
                kind.setdefault(cpus.first, []).append(key)
            else:
                shared |= cpus.bits
        watched = (
            Watched(
                sandbox_id, cpu, tuple(keys), tuple(alone.get(cpu, ())), bool(shared >> cpu & 1)
            )
            for cpu, keys in sorted(paired.items())
        )
        return cls(report, tuple(watched))


@dataclass
class Claims:
    """Derives both from the table of sandboxes; what a report says is derived once."""

    _sandboxes: Sandboxes
    _containers: Callable[[str], tuple[Container, ...]]

    def __post_init__(self) -> None:
        self._known: dict[str, _Claim] = {}

    def watched(self) -> Iterator[Watched]:
        """Yield the exclusive pCPUs that have a vCPU of their own, unless a pass is under way."""
        ids = self._sandboxes.ids
        self._known = {one: self._known[one] for one in ids if one in self._known}
        for sandbox_id in ids:
            cache = self._sandboxes.cache(sandbox_id)
            if cache is None or cache.report is None or cache.passing:
                continue
            claim = self._known.get(sandbox_id)
            if claim is None or claim.report is not cache.report:
                claim = self._known[sandbox_id] = _Claim.of(sandbox_id, cache.report)
            yield from claim.watched

    def is_passing(self, sandbox_id: str) -> bool:
        """Whether a pass over a sandbox is under way, so that `watched` leaves it out."""
        cache = self._sandboxes.cache(sandbox_id)
        return cache is not None and cache.passing

    def owner(self, sandbox_id: str, cpu: int) -> Owner:
        """Return the owner of a pCPU with all threads that are placed there."""
        own: dict[int, str] = {}
        report = self._report(sandbox_id)
        if report is not None:
            labels = {thread.key: thread.label for thread in report.threads}
            for key, (cpus, _) in _places(report).items():
                if cpu in cpus:
                    own[key.tid] = labels.get(key, "")
        return Owner(cpu, sandbox_id, self.pod(sandbox_id), self._container(sandbox_id, cpu), own)

    def known(self) -> Known:
        """Return whose each thread, process and container is."""
        threads: dict[int, str] = {}
        processes: dict[int, str] = {}
        containers: dict[str, str] = {}
        pods: dict[str, str] = {}
        for sandbox_id in self._sandboxes.ids:
            report = self._report(sandbox_id)
            for thread in report.threads if report is not None else ():
                threads[thread.key.tid] = processes[thread.key.tgid] = sandbox_id
            containers[sandbox_id] = sandbox_id
            containers |= {one.id: sandbox_id for one in self._containers(sandbox_id)}
            pods[sandbox_id] = self.pod(sandbox_id)
        return Known(threads, processes, containers, pods)

    def exclusive(self) -> CpuSet:
        """Return every exclusive pCPU."""
        reports = (self._report(one) for one in self._sandboxes.ids)
        return union(one.placement.mask.exclusive for one in reports if one and one.placement)

    def pod(self, sandbox_id: str) -> str:
        """Return a sandbox's pod, its id where none is known."""
        return SandboxFacts(sandbox_id, self._containers(sandbox_id)).pod

    def _container(self, sandbox_id: str, cpu: int) -> str:
        report = self._report(sandbox_id)
        claims = report.placement.mask.claims if report and report.placement else ()
        owner = next((one.container_id for one in claims if cpu in one.exclusive), "")
        return next((c.name for c in self._containers(sandbox_id) if c.id == owner), "")

    def _report(self, sandbox_id: str) -> Report | None:
        cache = self._sandboxes.cache(sandbox_id)
        return None if cache is None else cache.report


def _places(report: Report) -> dict[ThreadKey, tuple[CpuSet, bool]]:
    """Return where each thread was placed, and whether it is a vCPU with that place for itself.

    A vCPU that others pin, as Kata can, is where it may run.
    """
    if report.placement is None:
        return {}
    desired, exclusive = report.placement.desired, report.placement.mask.exclusive
    places = {key: (one.applied, one.paired) for key, one in desired.items() if not one.release}
    for thread in report.threads:
        if thread.role.role is ThreadRole.VCPU and thread.key not in desired:
            cpus = thread.task.affinity
            places[thread.key] = cpus, cpus <= exclusive
    return places
