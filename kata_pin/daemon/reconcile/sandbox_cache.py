"""What is known of one sandbox between passes; all of it can be found again."""

from __future__ import annotations

from dataclasses import dataclass, field

from kata_pin.daemon.reconcile.other_writers import OtherWriters
from kata_pin.host.tasks import TaskReader
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.placement import Placement, Report
from kata_pin.model.reports.sandbox import Writer
from kata_pin.model.sandbox import Vmm
from kata_pin.model.thread import ThreadKey
from kata_pin.policy.placement.cautious import OthersCpus
from kata_pin.policy.placement.notes import KATA_PINS_VCPUS
from kata_pin.policy.placement.writers import NO_KATA_PINNING, KataPinning, KataPinningMode
from kata_pin.vmm.overhead import Helper
from kata_pin.vmm.role_cache import RoleCache
from kata_pin.wire.qemu.qmp import QmpAnswers


@dataclass
class SandboxCache:
    """See the module. Lives as long as its sandbox."""

    roles: RoleCache = field(default_factory=RoleCache)
    tasks: TaskReader = field(default_factory=TaskReader)
    vmm: Vmm | None = None
    problem: str = ""
    qmp: QmpAnswers | None = None
    asked: frozenset[ThreadKey] = frozenset()
    """The threads that `qmp` was asked about: they lived before."""

    report: Report | None = None
    checked_at: float = 0.0
    passing: bool = False
    """Whether a pass is under way: threads need not be where `report` says."""

    other_writers: OtherWriters = field(default_factory=OtherWriters)
    kata: KataPinning = NO_KATA_PINNING
    configured: CpuSet = EMPTY
    """The cpuset configured for the sandbox's cgroup, where a pass needed it."""

    decided: tuple[object, Placement] | None = None
    """The last placement, and all that it was decided from."""

    others: OthersCpus | None = None
    """What others have exclusively, for a pass without the daemon; None: the daemon's own pass."""

    helpers: tuple[object, tuple[Helper, ...]] | None = None
    """The helpers that were found last, and what they were found by."""

    @property
    def unsure(self) -> bool:
        """Whether a thread may soon turn out to be a vCPU; no event reports that."""
        return self.vmm is not None and self.roles.unsure(
            self.vmm.guest.boot, self.vmm.guest.maximum
        )

    @property
    def processes(self) -> frozenset[int]:
        """The pids whose threads the last pass read."""
        return frozenset(t.key.tgid for t in self.report.threads) if self.report else frozenset()

    def writers(self, now: float) -> tuple[Writer, ...]:
        """Return the other writers of the sandbox's affinities, Kata first; `now` is monotonic."""
        found: list[Writer] = []
        if self.kata.mode is not KataPinningMode.OFF:
            placement = self.report.placement if self.report is not None else None
            active = placement is not None and any(
                note.code == KATA_PINS_VCPUS for note in placement.notes
            )
            how = " by NUMA node" if self.kata.mode is KataPinningMode.NUMA else ""
            evidence = f"enable_vcpus_pinning{how} (by {self.kata.evidence})"
            found.append(Writer("kata", active, evidence, count=0, since_s=None, tids=()))
        other = self.other_writers.writer(now)
        return (*found, other) if other is not None else tuple(found)
