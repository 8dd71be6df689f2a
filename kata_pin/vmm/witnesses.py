"""What confirms that a process is a sandbox's VMM, and how strongly (D24).

Each is something that the process could not have made itself. A pid proves only what it was when it
was written down: a hook's message does not count for a process that started after it, and no pid
counts that the sandbox's earlier VMM had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from kata_pin.model.thread import Process, ProcessKey
from kata_pin.vmm import checks
from kata_pin.vmm.checks import Refused
from kata_pin.vmm.host_access import HostAccess
from kata_pin.vmm.kinds import VmmKind
from kata_pin.vmm.shims import Shims
from kata_pin.vmm.state_files import KataPaths, read_jailed_pids, read_pids


class Strength(IntEnum):
    """How strongly a witness confirms: of two that claim one sandbox the stronger wins."""

    NONE = 0
    CGROUP = 1
    FILE = 2
    SHIM = 3
    HOOK = 4


class Witness(NamedTuple):
    """A witness: its strength, and what it is in words."""

    strength: Strength
    text: str


class Accepted(NamedTuple):
    """The VMM that was accepted for a sandbox before, and how strongly it was confirmed."""

    process: ProcessKey
    strength: int


NO_HINTS: Final[Mapping[int, int]] = MappingProxyType({})


@dataclass
class Witnesses:
    """Gathers what confirms a sandbox's VMM; one lives for one search.

    `hints` are the pids that hooks reported over the root-only socket, each with the time of the
    first message (CLOCK_BOOTTIME in ns, 0: unknown). `before` is the VMM accepted before.
    """

    host: HostAccess
    shims: Shims
    paths: KataPaths
    sandbox_id: str
    hints: Mapping[int, int]
    before: Accepted | None
    programs: Iterable[str] = ()
    """The names of programs that Kata may run in a jail."""

    _recorded: dict[int, str] | None = field(default=None, init=False)
    _jailed: set[int] | None = field(default=None, init=False)

    @property
    def recorded(self) -> dict[int, str]:
        """The pids in Kata's files, and in which; of a VMM in the shim that is a thread."""
        if self._recorded is None:
            pids = read_pids(self.host.root, self.paths, self.sandbox_id)
            groups = {checks.thread_group(self.host.root, pid): name for pid, name in pids.items()}
            self._recorded = groups
        return self._recorded

    @property
    def jailed(self) -> set[int]:
        """The pids that jailers left in the sandbox's jails; a VMM may have written them itself."""
        if self._jailed is None:
            self._jailed = read_jailed_pids(
                self.host.root, self.paths, self.sandbox_id, self.programs
            )
        return self._jailed

    def is_named_now(self, process: Process) -> bool:
        """Whether a hook or one of Kata's files names this process, not an earlier one."""
        return not self._is_reused(process) and (
            process.pid in self.recorded or process.pid in self.jailed or self._is_hinted(process)
        )

    def of(self, process: Process, kind: VmmKind, status: checks.Status, jail: str = "") -> Witness:
        """Return the strongest witness; raises Refused without one that is strong enough.

        `jail` is the sandbox's jail where it was verified that the process runs in it.
        """
        found = self._strongest(process, kind, status, jail)
        before = self.before
        if before is None or before.process == process.key or found.strength >= before.strength:
            return found
        raise Refused(
            f"it is confirmed only by {found.text}; the VMM before it (pid {before.process.pid})"
            " was confirmed by more"
        )

    def _strongest(
        self, process: Process, kind: VmmKind, status: checks.Status, jail: str
    ) -> Witness:
        pid, reused = process.pid, self._is_reused(process)
        doubts: list[str] = []
        if self._is_hinted(process) and not reused:
            return Witness(Strength.HOOK, "pid from a hook")
        if pid in self.hints:
            doubts.append("the pid in a hook was an earlier process's")
        if not kind.in_shim:
            why = self.shims.why_not(process.ppid, self.sandbox_id)
            if not why:
                return Witness(
                    Strength.SHIM, f"its parent, the sandbox's shim (pid {process.ppid})"
                )
            doubts.append(f"its parent (pid {process.ppid}) is not the shim: {why}")
        name = self.recorded.get(pid)
        if name and not reused:
            return Witness(Strength.FILE, f"pid in {name}")
        if name:
            doubts.append(f"the pid in {name} was an earlier process's")
        if jail:
            return Witness(Strength.FILE, f"its root is the sandbox's jail {jail}")
        doubts += self._cgroup_doubts(process, status)
        if not doubts[-1]:
            return Witness(Strength.CGROUP, "cgroup holds the sandbox id")
        raise Refused(f"no cgroup, parent, file or hook confirms it ({'; '.join(doubts)})")

    def _is_hinted(self, process: Process) -> bool:
        stamp_ns = self.hints.get(process.pid)
        return stamp_ns is not None and checks.started_by(process, stamp_ns)

    def _is_reused(self, process: Process) -> bool:
        """Whether it has the pid of the VMM that was accepted before, and is another process."""
        before = self.before
        return (
            before is not None
            and before.process.pid == process.pid != 0
            and (before.process != process.key)
        )

    def _cgroup_doubts(self, process: Process, status: checks.Status) -> list[str]:
        """Return why no cgroup confirms it; one empty text where one does."""
        entries = self.host.cgroups(process.pid).naming(self.sandbox_id)
        if not entries:
            return ["no cgroup is named after the sandbox"]
        if not checks.is_roots(self.host.root, status):
            return ["its cgroup does not count because it does not run as root"]
        doubts = {self.host.why_not_roots(entry) for entry in entries}
        return [""] if "" in doubts else sorted(doubts)
