"""Which process is a sandbox's VMM: the known one while it lives, else the one that is believed.

What was accepted is stored, so that it is not replaced by less (D24).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kata_pin.daemon.journal import VMM_CLAIMED, about
from kata_pin.daemon.reconcile.survey import Survey
from kata_pin.daemon.store.vmms import AcceptedVmms
from kata_pin.errors import VmmError
from kata_pin.host.process import ProcessIndex, is_alive
from kata_pin.host.root import HostRoot
from kata_pin.model.sandbox import Container, Vmm
from kata_pin.model.thread import Process
from kata_pin.vmm.checks import started_by
from kata_pin.vmm.find import VmmFinder
from kata_pin.vmm.witnesses import Strength

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VmmSearch:
    """See the module. The caller refreshes `index`, the process table that `finder` has.

    After a start, an accepted VMM that is confirmed again is believed before other processes were
    looked at; once they were, `find` compares it with those that claim the same sandbox.
    """

    root: HostRoot
    index: ProcessIndex
    finder: VmmFinder
    vmms: AcceptedVmms
    survey: Survey
    _uncompared: set[str] = field(default_factory=set)

    def was_accepted(self, sandbox_id: str) -> bool:
        """Whether the VMM that was accepted for a sandbox before still runs."""
        before = self.vmms.of(sandbox_id)
        return before is not None and before.strength > 0 and is_alive(self.root, before.process)

    async def prepare(
        self, sandbox_id: str, containers: Iterable[Container], known: Vmm | None
    ) -> None:
        """Read what `find` needs of processes, where it has to look for the VMM at all."""
        if known is None or not is_alive(self.root, known.process):
            await self.survey.before_pass(sandbox_id, _hints(containers))

    def find(
        self, sandbox_id: str, containers: Iterable[Container], known: Vmm | None
    ) -> tuple[Vmm | None, str]:
        """Return the VMM as of now, or why there is none; `known` is the one found last."""
        hints, orphan = _hints(containers), False
        if known is not None and not is_alive(self.root, known.process):
            known = None
        if not self.survey.complete and known is None:
            known = self.finder.confirm(sandbox_id, hints)
            if known is not None:
                self._uncompared.add(sandbox_id)
        if known is not None:
            process = self.index.get(known.process.pid)
            orphan = process is not None and process.ppid != known.parent
            due = self.survey.complete and sandbox_id in self._uncompared
            if due:
                self._uncompared.discard(sandbox_id)
            if not due and not orphan and not _confirms_more(known, process, hints):
                return known, ""
        try:
            vmm = self.finder.find(sandbox_id, hints)
        except VmmError as error:
            if known is None:
                return None, str(error)
            # It was accepted, and is the same process.
            return replace(known, orphan=known.orphan or orphan), ""
        self.vmms.keep(sandbox_id, vmm)
        for other in vmm.refused:
            claimed = about(VMM_CLAIMED)
            log.warning("sandbox %s: not believed as its VMM: %s", sandbox_id, other, extra=claimed)
        return vmm, ""

    def forget(self, sandbox_id: str) -> None:
        """Note that a sandbox has ended."""
        self._uncompared.discard(sandbox_id)
        self.vmms.ended(sandbox_id)

    def runs_without_vmm(self, containers: Iterable[Container]) -> bool:
        """Whether the hooks' pids show that another runtime than Kata runs these containers.

        Kata's hooks report the VMM's pid or a thread of its shim (with both runtimes); those of
        runc and crun the container's first process. False if those processes are gone.
        """
        answers = [self.finder.is_kata(pid) for pid in _hints(containers)]
        return bool(answers) and all(answer is False for answer in answers)

    def is_claimed(self, sandbox_id: str, containers: Iterable[Container]) -> bool:
        """Whether a process says that it is the sandbox's VMM, although it is not accepted.

        The one that was accepted before a restart may be one that cannot be verified now.
        """
        before = self.vmms.of(sandbox_id)
        if before is not None and is_alive(self.root, before.process):
            return True
        return self.finder.is_claimed(sandbox_id, _hints(containers))


def _confirms_more(known: Vmm, process: Process | None, hints: Mapping[int, int]) -> bool:
    """Whether a hook has named a VMM since it was found by less."""
    stamp_ns = hints.get(known.process.pid)
    named = stamp_ns is not None and process is not None and started_by(process, stamp_ns)
    return named and known.strength < Strength.HOOK


def _hints(containers: Iterable[Container]) -> dict[int, int]:
    """Return the pids that hooks reported, each with the time of its first message."""
    hints: dict[int, int] = {}
    for one in containers:
        if one.pid_hint:
            known = hints.get(one.pid_hint, one.recorded_ns)
            hints[one.pid_hint] = min(known, one.recorded_ns)
    return hints
