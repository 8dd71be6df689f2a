"""What both the daemon and a command without a daemon are made of, built in order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kata_pin.config.tree import Config
from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.checked_policy import make_policy
from kata_pin.daemon.allocation.pass_view import granted, view
from kata_pin.daemon.allocation.pending_passes import PendingPasses
from kata_pin.daemon.guests.manager import Agents
from kata_pin.daemon.intake.kata_state import Adoption
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.engine import Engine
from kata_pin.daemon.reconcile.kata_pinning import KataPinningReader
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.thread_finder import ThreadFinder
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.grants import AllocStore
from kata_pin.daemon.store.pins import Pins
from kata_pin.host.files import read_text
from kata_pin.host.process import ProcessIndex, cgroups, cmdline, exe, read_process
from kata_pin.host.root import HostRoot
from kata_pin.sources.bundles import BundleReader
from kata_pin.sources.kata_config import read_kata_configs
from kata_pin.vmm.allow_list import DEFAULT_EXECUTABLES
from kata_pin.vmm.find import VmmFinder
from kata_pin.vmm.host_access import HostAccess
from kata_pin.vmm.state_files import KataPaths


@dataclass
class Components:
    """The objects of one configuration; assembly.py and offline.py build on them."""

    live: LiveConfig
    root: HostRoot
    registry: Registry
    pins: Pins
    bundles: BundleReader
    node: NodeWatch
    index: ProcessIndex
    finder: VmmFinder
    engine: Engine
    kata: KataPaths
    agents: Agents
    adoption: Adoption
    allocator: Allocator
    kata_pinning: KataPinningReader


def compose(config: Config, registry: Registry, passes: PendingPasses | None = None) -> Components:
    """Return the components for this host; raises HostError without /proc.

    `passes` are the allocator's; without them it decides nothing.
    """
    live = LiveConfig(config)
    pins = Pins(registry)
    root = HostRoot(debugfs=config.paths.debugfs)
    node = NodeWatch(root, live, live_threads=pins.live_threads())
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
    bundles = BundleReader(config.paths.bundle_roots)
    make = partial(make_policy, config.alloc)
    allocator = Allocator(config.alloc, node, AllocStore(registry), make, passes)
    kata_pinning = KataPinningReader(root, kata, bundles, files)
    threads = ThreadFinder(root, node, index, host, kata)
    engine = Engine(
        root, node, pins, index, threads, finder, kata_pinning,
        partial(view, allocator), partial(granted, allocator),
    )  # fmt: skip
    agents, adoption = Agents(root, kata, live), Adoption(root, registry, kata, finder, index)
    return Components(
        live, root, registry, pins, bundles, node, index, finder, engine, kata, agents, adoption,
        allocator, kata_pinning,
    )  # fmt: skip


def boot_id(root: HostRoot) -> str:
    """Return the kernel's id of this boot; raises OSError."""
    return read_text(root.proc("sys/kernel/random/boot_id")).strip()
