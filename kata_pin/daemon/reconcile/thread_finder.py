"""Finds every thread that works for a sandbox, with its role: the VMM's own and its helpers'.

What is known of threads and helpers is in the sandbox's cache, and makes finding them cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.errors import TaskGone
from kata_pin.host.cpuset import CpusetReader
from kata_pin.host.process import ProcessIndex, is_alive
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import list_tids
from kata_pin.model.sandbox import Vmm
from kata_pin.model.steps import Steps
from kata_pin.model.thread import Role, Thread, ThreadKey
from kata_pin.vmm.host_access import HostAccess
from kata_pin.vmm.overhead import Helper, find_helpers
from kata_pin.vmm.roles import identify_in_steps
from kata_pin.vmm.shims import Shims
from kata_pin.vmm.state_files import KataPaths, state_stamp

MAX_READ: Final = 8192
"""Threads of one sandbox that are looked at; each takes some 3 KiB. Those beyond keep the affinity
that they inherited from the thread that made them."""


@dataclass(frozen=True)
class ThreadFinder:
    """See the module. The caller refreshes `index`, the process table that `host` has."""

    root: HostRoot
    node: NodeWatch
    index: ProcessIndex
    host: HostAccess
    kata: KataPaths
    shims: Shims

    def find(self, sandbox_id: str, vmm: Vmm, cache: SandboxCache) -> Steps[list[Thread]]:
        """Return the threads, those of the VMM first; raises TaskGone when the VMM is gone."""
        cpusets = CpusetReader(self.root, self.node.cgroup_mounts)
        cache.tasks.expire(cache.processes)
        cache.tasks.left_out = 0
        answers, asked = cache.qmp, cache.asked  # later ones may be about younger threads
        tasks = yield from cache.tasks.read_in_steps(
            self.root, vmm.process.pid, cpusets, most=MAX_READ
        )
        roles = yield from identify_in_steps(
            self.host, vmm, tasks, cache.roles, answers, asked=asked
        )
        threads = [Thread(task, roles[task.key]) for task in tasks if task.key in roles]
        for helper in self._helpers(sandbox_id, vmm, [task.key for task in tasks], cache):
            role = Role(helper.role, helper.source)
            room = MAX_READ - len(threads)
            if room <= 0:
                cache.tasks.left_out += 1
                continue
            try:
                helpers = yield from cache.tasks.read_in_steps(
                    self.root, helper.process.pid, cpusets, most=room
                )
            except TaskGone:
                continue
            if is_alive(self.root, helper.process):
                threads += [Thread(task, role) for task in helpers]
        return threads

    def _helpers(
        self, sandbox_id: str, vmm: Vmm, own: list[ThreadKey], cache: SandboxCache
    ) -> tuple[Helper, ...]:
        """Return the sandbox's helpers, found again where a process or Kata's state changed."""
        inputs = (self.index.version, vmm, own, state_stamp(self.root, self.kata, sandbox_id))
        if cache.helpers is None or cache.helpers[0] != inputs:
            cache.helpers = (
                inputs,
                find_helpers(self.host, vmm, sandbox_id, own, self.shims, paths=self.kata),
            )
        return cache.helpers[1]

    def has_all(self, threads: Sequence[Thread], vmm: Vmm) -> bool:
        """Whether no process has a thread that is not among these; TaskGone for the VMM.

        Threads born while masks were set inherited what their creator had at that moment. A helper
        that is gone has no new threads, and says nothing about the VMM.
        """
        seen: dict[int, set[int]] = {vmm.process.pid: set()}
        for thread in threads:
            key = thread.task.key
            seen.setdefault(key.tgid, set()).add(key.tid)
        return all(tids.issuperset(self._tids(tgid, vmm)) for tgid, tids in seen.items())

    def _tids(self, tgid: int, vmm: Vmm) -> list[int]:
        try:
            return list_tids(self.root, tgid)
        except TaskGone:
            if tgid == vmm.process.pid:
                raise
            return []
