"""Where the memory of running VMs is, for choosing CPUs near it.

It is looked at when a running container's CPUs are about to change, from the counters of the VMM's
cgroup, which cost a few small reads. Lifetime: the daemon's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.errors import ParseError
from kata_pin.host.measure.cgroups import CgroupFiles
from kata_pin.host.root import HostRoot
from kata_pin.model.alloc import AllocState, ContainerRequest
from kata_pin.model.cpuset import EMPTY
from kata_pin.model.sandbox import Vmm
from kata_pin.policy.alloc.allotment import sandbox_of


@dataclass(frozen=True)
class MemoryHomes:
    """Knows the VMM of a sandbox, None while there is none."""

    root: HostRoot
    node: NodeWatch
    vmm: Callable[[str], Vmm | None]

    def seen(self, state: AllocState, request: ContainerRequest) -> AllocState:
        """Return a state that knows where the memory of this request's VM is now."""
        sandbox_id = sandbox_of(request.pod)
        vmm = self.vmm(sandbox_id) if sandbox_id else None
        nodes = self.node.current().topology.nodes
        if vmm is None or len(nodes) < 2:
            return state
        home = nodes.get(_home(self.root, vmm.process.pid), EMPTY)
        known = {one: cpus for one, cpus in state.memory.items() if one in state.grants}
        return replace(state, memory={**known, request.pod.sandbox_id: home})


def _home(root: HostRoot, pid: int) -> int:
    """Return the node with more than half of what a process's own cgroup counts, -1 without one."""
    files, huge = CgroupFiles(root, "memory"), CgroupFiles(root, "hugetlb")
    for folder in files.folders(pid, pid) or ():
        with suppress(OSError, ParseError):
            sizes = {
                node: one.total
                for node, one in files.memory(folder, os.sysconf("SC_PAGE_SIZE")).items()
            }
            for node, one in huge.huge_pages(huge.folders(pid, pid) or (), folder).items():
                sizes[node] = sizes.get(node, 0) + one.total
            node = max(sizes, key=lambda one: sizes[one], default=-1)
            return node if node >= 0 and 2 * sizes[node] > sum(sizes.values()) else -1
    return -1
