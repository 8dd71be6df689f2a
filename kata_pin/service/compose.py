"""What both the daemon and a command without a daemon are made of, built in order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kata_pin.base.config.tree import Config, LiveConfig, NriEnabled
from kata_pin.engine.node import NodeWatch, PcpuOwners
from kata_pin.engine.observe import Survey, ThreadFinder, VmmSearch, log_locked
from kata_pin.engine.passes import Engine
from kata_pin.engine.sandbox_cache import KataPinningReader
from kata_pin.engine.sandboxes import Neighbours, Sandboxes
from kata_pin.follow.reports import Adoption
from kata_pin.guest.keeper import Agents
from kata_pin.linux.files import HostRoot, read_text
from kata_pin.linux.process import ProcessIndex, cgroups, exe, exe_paths, read_process
from kata_pin.peers.kata import read_kata_configs
from kata_pin.records.bundles import BundleReader
from kata_pin.records.containers import Registry
from kata_pin.records.history import NodeEvents
from kata_pin.records.pins import AcceptedVmms, Pins
from kata_pin.rights.calls import Calls
from kata_pin.service.options import Core, Options
from kata_pin.vmm.checks import DEFAULT_EXECUTABLES, DEFAULT_SHIMS, SlowFacts
from kata_pin.vmm.find import Executables, VmmFinder
from kata_pin.vmm.state_files import HostAccess, KataPaths

if TYPE_CHECKING:  # only a daemon needs them
    from kata_pin.follow.reports import NriIntake
    from kata_pin.peers.nri.plugin import NriPlugin


def compose(
    config: Config,
    registry: Registry,
    root: HostRoot | None = None,
    sandboxes: Sandboxes | None = None,
) -> Core:
    """Return the components for the host of `root`, this one by default; HostError without /proc.

    A daemon fills `sandboxes`. No option runs yet.
    """
    live = LiveConfig(config)
    pins = Pins(registry)
    root = root or HostRoot(debugfs=config.paths.debugfs)
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
        partial(exe_paths, root),
        facts.exe_file,
        partial(cgroups, root),
    )
    files = read_kata_configs(config.paths.kata_configs)
    configured = (path for file in files for one in file.configs for path in one.binaries)
    executables = Executables(
        vmms=(*DEFAULT_EXECUTABLES, *config.hypervisors, *configured),
        shims=(*DEFAULT_SHIMS, *config.shims),
    )
    sandboxes = sandboxes or Sandboxes()
    vmms, neighbours = AcceptedVmms(registry), Neighbours(registry, sandboxes)
    finder = VmmFinder(host, paths=kata, executables=executables, before=vmms.of)
    bundles = BundleReader(config.paths.bundle_roots, root.calls)
    events = NodeEvents(registry)
    options = Options(sandboxes)
    kata_pinning = KataPinningReader(root, kata, bundles, files)
    threads = ThreadFinder(root, node, index, host, kata, finder.shims)
    survey = Survey(index, finder, facts)
    search = VmmSearch(root, index, finder, vmms, survey)
    engine = Engine(
        root, node, pins, index, threads, search, kata_pinning,
        options.allot, options.granted, neighbours.exclusive,
    )  # fmt: skip
    agents = Agents(root, kata, live)
    adoption = Adoption(root, registry, kata, finder, index, bundles)
    return Core(
        live, root, registry, pins, bundles, node, index, finder, engine, kata, agents, adoption,
        events, kata_pinning, survey, neighbours,
        PcpuOwners(sandboxes, registry.containers), sandboxes, options,
    )  # fmt: skip


def nri_plugin(config: Config, intake: NriIntake, calls: Calls) -> NriPlugin | None:
    """Return the NRI plugin; without one updates are found in Kata's state."""
    nri = config.nri
    if nri.enabled is NriEnabled.NO:
        return None
    from kata_pin.peers.nri.plugin import NriPlugin  # noqa: PLC0415 - only a daemon needs it

    return NriPlugin(
        intake,
        socket_path=nri.socket,
        name=nri.name,
        index=nri.index,
        wanted=nri.enabled is NriEnabled.YES,
        calls=calls,
    )


def boot_id(root: HostRoot) -> str:
    """Return the kernel's id of this boot; raises OSError."""
    return read_text(root.proc("sys/kernel/random/boot_id")).strip()
