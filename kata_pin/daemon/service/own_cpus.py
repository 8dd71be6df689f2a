"""Keeps kata-pin's own processes off exclusive pCPUs: the daemon, its broker, hooks and commands.

The first two are moved here. The others find in a file which pCPUs are left, as a hexadecimal
mask, and move themselves (hook.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import ESRCH, ESTALE
from typing import Final

from kata_pin.calls import Calls, Change
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.errors import HostError, TaskGone, reason_of
from kata_pin.hook import FREE_CPUS
from kata_pin.host.files import read_text
from kata_pin.host.root import HOST
from kata_pin.host.tasks import list_tids, starttime
from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.pass_outcome import RELEASED, PassOutcome

log = logging.getLogger(__name__)

_PROC: Final = "/proc"


class OwnCpus:
    """An observer of passes; `look` finds what no pass shows (grants, the kubelet's checkpoint)."""

    def __init__(
        self,
        runtime_dir: str,
        node: NodeWatch,
        calls: Calls,
        broker: int,
        granted: Callable[[], CpuSet],
    ) -> None:
        """`broker` is the broker's pid; `granted` returns what the allocator gave exclusively."""
        self._path = os.path.join(runtime_dir, FREE_CPUS)
        self._node = node
        self._calls = calls
        self._broker = broker
        self._granted = granted
        self._exclusive: dict[str, CpuSet] = {}
        self._first = CpuSet(os.sched_getaffinity(0))
        self._confined = not node.last.topology.online <= self._first
        self._kept = EMPTY
        self._problem = ""

    def passed(self, outcome: PassOutcome) -> None:
        """Keep off what a sandbox has now."""
        decided = outcome.report.placement
        mine = EMPTY if decided is None or outcome.state == RELEASED else decided.mask.exclusive
        if self._exclusive.get(outcome.sandbox_id) != mine:
            self._exclusive[outcome.sandbox_id] = mine
            self.look()

    def ended(self, outcome: PassOutcome) -> None:
        """Use again what a sandbox had."""
        if self._exclusive.pop(outcome.sandbox_id, EMPTY):
            self.look()

    def failed(self, operation: str, error: Exception) -> None:
        """Keep off what the former pass found."""

    def look(self) -> None:
        """Move to the pCPUs that are nobody's alone; where there are none, to all of ours."""
        node = self._node.last
        online = node.topology.online
        ours = self._first & online if self._confined else online
        taken = union((*self._exclusive.values(), self._granted(), node.assigned))
        free = ours - taken or ours
        if free == self._kept:
            return
        try:
            self._move(free)
            self._publish(free)
            self._kept, self._problem = free, ""
        except (OSError, HostError) as error:  # the next look tries again
            if reason_of(error) != self._problem:
                log.warning("kata-pin itself may run on exclusive pCPUs: %s", reason_of(error))
            self._problem = reason_of(error)

    def _move(self, cpus: CpuSet) -> None:
        for tid in list_tids(HOST, os.getpid()):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(tid, cpus)
        changes = []
        for pid in (self._broker, *_children(self._broker)):
            with suppress(TaskGone):
                changes.append(Change(pid, pid, starttime(HOST, pid, pid), 0, frozenset(cpus)))
        for changed in self._calls.set_affinities(changes, _PROC):
            if changed.errno not in {0, ESRCH, ESTALE}:
                raise OSError(changed.errno, os.strerror(changed.errno))

    def _publish(self, cpus: CpuSet) -> None:
        fresh = f"{self._path}.new"
        with suppress(FileNotFoundError):  # what a killed daemon left may be another user's
            os.unlink(fresh)
        with open(fresh, "x", encoding="ascii") as file:
            file.write(f"{cpus.bits:x}\n")
        os.rename(fresh, self._path)


def _children(pid: int) -> Iterator[int]:
    """Yield the children of a process, none without CONFIG_PROC_CHILDREN."""
    with suppress(OSError):
        yield from map(int, read_text(HOST.proc(pid, "task", pid, "children")).split())
