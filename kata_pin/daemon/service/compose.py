"""Putting the parts together: what both the daemon and a command without a daemon need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from kata_pin.config.tree import Config
from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.pending_passes import PendingPasses
from kata_pin.daemon.allocation.policies import make_policy
from kata_pin.daemon.intake.kata_state import Adoption
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.engine import Engine
from kata_pin.daemon.reconcile.kata_pinning import KataPinningReader
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.store.database import Registry
from kata_pin.daemon.store.grants import AllocStore
from kata_pin.errors import TaskGone
from kata_pin.host.files import read_text
from kata_pin.host.process import ProcessIndex, cgroups, cmdline, exe, read_process
from kata_pin.host.root import HostRoot
from kata_pin.model.thread import ProcessKey
from kata_pin.sources.bundles import BundleReader
from kata_pin.sources.kata_config import read_kata_configs
from kata_pin.vmm.allow_list import DEFAULT_EXECUTABLES
from kata_pin.vmm.find import NONE_KNOWN, VmmFinder
from kata_pin.vmm.host_access import HostAccess
from kata_pin.vmm.overhead import served_by
from kata_pin.vmm.state_files import KataPaths

KTHREADD: Final = 2
"""The pid of the parent of all kernel threads."""


@dataclass
class Components:
    """The composed parts; they live as long as the configuration's paths."""

    live: LiveConfig
    root: HostRoot
    registry: Registry
    node: NodeWatch
    index: ProcessIndex
    finder: VmmFinder
    engine: Engine
    kata: KataPaths
    adoption: Adoption
    allocator: Allocator
    kata_pinning: KataPinningReader

    def adopt_all(self, known: Mapping[str, ProcessKey] = NONE_KNOWN) -> dict[str, int]:
        """Record what Kata keeps of every sandbox that runs; return how much was new, by id.

        `known` are the VMMs of the sandboxes that are known already.
        """
        return self.adoption.all(self.finder.sandboxes(known))

    def served_by(self, pid: int, ppid: int) -> int:
        """Return the process that a new process works for: its parent, or a kernel worker's VMM.

        Before Linux 6.4 vhost workers are kernel threads (vmm/overhead.py).
        """
        if ppid != KTHREADD:
            return ppid
        try:
            name = read_process(self.root, pid).comm
        except TaskGone:
            return ppid
        return served_by(self.root, name) or ppid


def compose(config: Config, registry: Registry, passes: PendingPasses | None = None) -> Components:
    """Return the parts for this host; raises HostError without /proc.

    `passes` are the allocator's; without them it decides nothing.
    """
    live = LiveConfig(config)
    root = HostRoot(debugfs=config.paths.debugfs)
    node = NodeWatch(root, live, live_threads=registry.live_threads())
    index = ProcessIndex(root)
    kata = KataPaths(vc=config.paths.vc, kata=config.paths.kata)
    host = HostAccess(
        root,
        index,
        partial(read_process, root),
        partial(cmdline, root),
        partial(exe, root),
        partial(cgroups, root),
    )
    files = read_kata_configs(config.paths.kata_configs)
    configured = (path for file in files for one in file.configs for path in one.binaries)
    executables = (*DEFAULT_EXECUTABLES, *config.hypervisors, *configured)
    finder = VmmFinder(host, paths=kata, executables=executables)
    make = partial(make_policy, config.alloc)
    allocator = Allocator(config.alloc, node, AllocStore(registry), make, passes)
    kata_pinning = KataPinningReader(root, kata, BundleReader(config.paths.bundle_roots), files)
    engine = Engine(
        root, node, registry, index, host, finder, kata, kata_pinning, allocator.view,
        allocator.granted,
    )  # fmt: skip
    adoption = Adoption(root, registry, kata)
    return Components(
        live, root, registry, node, index, finder, engine, kata, adoption, allocator, kata_pinning
    )


def boot_id(root: HostRoot) -> str:
    """Return the kernel's id of this boot; raises OSError."""
    return read_text(root.proc("sys/kernel/random/boot_id")).strip()
