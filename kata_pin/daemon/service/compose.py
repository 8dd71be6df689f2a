"""What both the daemon and a command without a daemon are made of, built in order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kata_pin.calls import DIRECT, Calls
from kata_pin.config.tree import Config, NriEnabled
from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.checked_policy import make_policy
from kata_pin.daemon.allocation.holders import Holders
from kata_pin.daemon.allocation.memory_home import MemoryHomes
from kata_pin.daemon.allocation.nri_decider import nri_decider, plugin_index
from kata_pin.daemon.allocation.pass_view import granted, view
from kata_pin.daemon.allocation.pending_passes import PendingPasses
from kata_pin.daemon.allocation.placement_files import PlacementFiles
from kata_pin.daemon.guests.manager import Agents
from kata_pin.daemon.intake.kata_state import Adoption
from kata_pin.daemon.intake.nri_events import NriIntake
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.quiet.claims import PodFacts
from kata_pin.daemon.quiet.keeper import QuietKeeper
from kata_pin.daemon.quiet.kernel_work import KernelWork
from kata_pin.daemon.reconcile.engine import Engine
from kata_pin.daemon.reconcile.kata_pinning import KataPinningReader
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.survey import Survey, log_locked
from kata_pin.daemon.reconcile.thread_finder import ThreadFinder
from kata_pin.daemon.reconcile.vmm_search import VmmSearch
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.grants import AllocStore
from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.daemon.store.pins import Pins
from kata_pin.daemon.store.tunables import Tunables
from kata_pin.daemon.store.vmms import AcceptedVmms
from kata_pin.host.cgroup_owner import why_not_roots
from kata_pin.host.files import read_text
from kata_pin.host.process import ProcessIndex, cgroups, exe, read_process
from kata_pin.host.root import HostRoot
from kata_pin.host.vfio import vfio_devices
from kata_pin.sources.bundles import BundleReader
from kata_pin.sources.kata_config import read_kata_configs
from kata_pin.sources.nri import NriPlugin
from kata_pin.vmm.allow_list import DEFAULT_EXECUTABLES, DEFAULT_SHIMS
from kata_pin.vmm.find import Executables, VmmFinder
from kata_pin.vmm.host_access import HostAccess
from kata_pin.vmm.slow_facts import SlowFacts
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
    events: NodeEvents
    kata_pinning: KataPinningReader
    survey: Survey


def compose(
    config: Config, registry: Registry, passes: PendingPasses | None = None, calls: Calls = DIRECT
) -> Components:
    """Return the components for this host; raises HostError without /proc.

    `passes` are the allocator's; without them it decides nothing. `calls` make what needs rights.
    """
    live = LiveConfig(config)
    pins = Pins(registry)
    root = HostRoot(debugfs=config.paths.debugfs, calls=calls)
    node = NodeWatch(root, live, live_threads=pins.live_threads())
    index = ProcessIndex(root)
    kata = KataPaths(vc=config.paths.vc, kata=config.paths.kata)
    facts = SlowFacts(root, partial(read_process, root), log_locked)
    host = HostAccess(
        root,
        index,
        partial(read_process, root),
        facts.cmdline,
        partial(exe, root),
        facts.exe_file,
        partial(cgroups, root),
        partial(why_not_roots, root),
    )
    files = read_kata_configs(config.paths.kata_configs)
    configured = (path for file in files for one in file.configs for path in one.binaries)
    executables = Executables(
        vmms=(*DEFAULT_EXECUTABLES, *config.hypervisors, *configured),
        shims=(*DEFAULT_SHIMS, *config.shims),
    )
    vmms = AcceptedVmms(registry)
    finder = VmmFinder(host, paths=kata, executables=executables, before=vmms.of)
    bundles = BundleReader(config.paths.bundle_roots, calls)
    make = partial(make_policy, config.alloc)
    store, holders = AllocStore(registry), Holders(registry)
    events = NodeEvents(registry)
    placements = PlacementFiles(config.runtime_dir, config.alloc)
    memory = None if passes is None else MemoryHomes(root, node, passes.vmm)
    allocator = Allocator(
        config.alloc, node, store, make, holders=holders, events=events, passes=passes,
        placements=placements, memory=memory,
    )  # fmt: skip
    kata_pinning = KataPinningReader(root, kata, bundles, files)
    threads = ThreadFinder(root, node, index, host, kata, finder.shims)
    survey = Survey(index, finder, facts)
    search = VmmSearch(root, index, finder, vmms, survey)
    engine = Engine(
        root, node, pins, index, threads, search, kata_pinning,
        partial(view, allocator), partial(granted, allocator),
    )  # fmt: skip
    agents, adoption = Agents(root, kata, live), Adoption(root, registry, kata, finder, index)
    return Components(
        live, root, registry, pins, bundles, node, index, finder, engine, kata, agents, adoption,
        allocator, events, kata_pinning, survey,
    )  # fmt: skip


def quiet_keeper(one: Components) -> QuietKeeper:
    """Return the keeper of quiet pCPUs; raises StateError."""
    facts = PodFacts(
        one.registry.containers, one.kata_pinning.annotations, partial(vfio_devices, one.root)
    )
    store = Tunables(one.registry)
    return QuietKeeper(
        *(one.root, one.node, one.live),
        store=store,
        events=one.events,
        facts=facts,
        sources=[KernelWork(one.root, one.live)],
    )


def nri_plugin(
    config: Config, intake: NriIntake, one: Components, pending: PendingPasses
) -> NriPlugin | None:
    """Return the NRI plugin; without one updates are found in Kata's state."""
    nri = config.nri
    if nri.enabled is NriEnabled.NO:
        return None
    decider = nri_decider(intake, one.allocator, one.registry, pending)
    return NriPlugin(
        decider or intake,
        socket_path=nri.socket,
        name=nri.name,
        index=plugin_index(one.allocator, nri.index),
        wanted=nri.enabled is NriEnabled.YES,
        decider=decider,
        calls=one.root.calls,
    )


def boot_id(root: HostRoot) -> str:
    """Return the kernel's id of this boot; raises OSError."""
    return read_text(root.proc("sys/kernel/random/boot_id")).strip()
