"""The core's objects, and options: what a node may want beside pins, imported if switched on.

An option is a row (base/config/options.py) with the name of its module, whose `start` returns what
runs. One that is off is started all the same while the registry has rows of it: a former daemon
changed something that is to be restored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from msgspec import Struct, convert, to_builtins

from kata_pin.base.config.options import OPTIONS, Option, known
from kata_pin.base.config.tree import Config, LiveConfig, NriEnabled
from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.documents.answers import Applied
from kata_pin.base.documents.check import Finding
from kata_pin.base.errors import ConfigError, KataPinError, StateError, reason_of
from kata_pin.base.placement import Note
from kata_pin.base.sandbox import Container
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import NoteLevel
from kata_pin.engine.counters import Observer, Shown
from kata_pin.engine.node import NodeWatch, PcpuOwners
from kata_pin.engine.observe import Survey, ThreadFinder, VmmSearch, log_locked
from kata_pin.engine.passes import Engine
from kata_pin.engine.sandbox_cache import KataPinningReader
from kata_pin.engine.sandboxes import Neighbours, Sandboxes
from kata_pin.follow.reports import Adoption, NriIntake
from kata_pin.guest.keeper import Agents
from kata_pin.guest.manager import Guests
from kata_pin.linux.files import HostRoot
from kata_pin.linux.process import ProcessIndex, cgroups, exe, exe_paths, read_process
from kata_pin.peers.kata import read_kata_configs
from kata_pin.peers.nri.plugin import NriPlugin
from kata_pin.placement.masks import Allotment, nothing_allotted
from kata_pin.records.bundles import BundleReader
from kata_pin.records.containers import Registry
from kata_pin.records.history import NodeEvents
from kata_pin.records.pins import AcceptedVmms, Pins
from kata_pin.rights.calls import Calls
from kata_pin.vmm.checks import DEFAULT_EXECUTABLES, DEFAULT_SHIMS, SlowFacts
from kata_pin.vmm.find import Executables, VmmFinder
from kata_pin.vmm.state_files import HostAccess, KataPaths

log = logging.getLogger(__name__)


class Serving(NamedTuple):
    """What a daemon has and a command does not; `start` runs a task until the daemon ends."""

    guests: Guests
    nri: NriPlugin | None
    nri_intake: NriIntake
    start: Callable[[Coroutine[object, object, None]], None]


@dataclass
class Core:
    """The objects of one configuration, for the daemon, for commands without one, and for options.

    `sandboxes` and `serving` are a daemon's: empty and None without one.
    """

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
    events: NodeEvents
    kata_pinning: KataPinningReader
    survey: Survey
    neighbours: Neighbours
    owners: PcpuOwners
    sandboxes: Sandboxes
    options: Options
    serving: Serving | None = None


class Running(Observer):
    """An option at work; by default each method does nothing."""

    def catch_up(self, recorded: Collection[str]) -> None:
        """Take in what happened without a daemon; `recorded` are the sandboxes that are known."""

    def before_deep_audit(self) -> object:
        """Look at what deep audits should know; what can be awaited is awaited."""

    def after_deep_audit(self) -> object:
        """Look at what no event may have told; in the same way."""

    def look(self) -> object:
        """Look at what no pass shows; after each audit, which awaits what can be awaited."""

    def tasks(self) -> Iterable[Coroutine[object, object, None]]:
        """Return what runs until the daemon ends."""
        return ()

    def allot(self, _containers: Sequence[Container]) -> Allotment | None:
        """Return a sandbox's containers with the CPUs that are now decided, None: not my business.

        Called by each pass.
        """
        return None

    def granted(self, _containers: Sequence[Container]) -> Allotment | None:
        """Return the same as decided so far; decides nothing."""
        return None

    def exclusive(self) -> CpuSet:
        """Return the pCPUs that it gave to containers exclusively."""
        return EMPTY

    def notes(self, sandbox_id: str) -> Iterable[Note]:
        """Return what an operator should know of a sandbox."""
        return ()

    def node_notes(self) -> Iterable[Note]:
        """Return what an operator should know of the node."""
        return ()

    def facts(self, sandbox_id: str) -> Mapping[str, Any]:
        """Return what a sandbox's document has of the option, by fields of KnownSandbox."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """Return what the state document has of it, by arguments of state_report."""
        return {}

    def thread(self, _key: ThreadKey) -> Mapping[str, Any]:
        """Return what a thread's row has of it now, by fields of Thread; for one sandbox alone."""
        return {}

    def verbs(self) -> Mapping[str, Callable[[], Struct]]:
        """Return its documents, each by the verb of the control socket that asks for it."""
        return {}

    def findings(self) -> Iterable[Finding]:
        """Return what `check` reports that the state document does not show."""
        return ()

    def violations(self) -> Mapping[str, int]:
        """Return how much is not as it should be now, by kinds of findings of `check`."""
        return Counter(finding.kind for finding in self.findings())

    def metrics(self) -> Iterable[Shown]:
        """Return what is counted, as `readings` does of rows."""
        return ()

    async def give_back(self, ids: Collection[str] | None) -> Mapping[str, Any]:
        """Restore what was changed for these sandboxes, for all and for the node if None.

        Returns what could not be restored, by fields of Applied. Raises KataPinError.
        """
        return {}


def is_due(option: Option, config: Config, registry: Registry) -> bool:
    """Whether it is switched on, or has something to restore; raises StateError."""
    return option.wanted(config) or has_rows(option, registry)


def has_rows(option: Option, registry: Registry) -> bool:
    """Whether it has something to restore; raises StateError."""
    return bool(option.table) and registry.has_rows(option.table)


def preload(config: Config) -> None:
    """Import the options that settings switch on: what a start needs is loaded before it begins."""
    for option in known(config):
        if option.wanted(config):
            import_module(option.module)


def _started(option: Option, core: Core) -> Running:
    """Import an option, and return it at work; raises KataPinError."""
    try:
        running: Running = import_module(option.module).start(core)
    except Exception as error:
        if option in OPTIONS or isinstance(error, KataPinError):
            raise
        raise ConfigError(
            f"the option cannot be started: {reason_of(error)}", key=option.name
        ) from error
    return running


async def guarded(task: Coroutine[object, object, None]) -> None:
    """Run an option's task; one that fails ends alone, and the daemon goes on."""
    try:
        await task
    except Exception as error:  # a fault barrier: an option may be of another package
        log.error("a task of an option has failed: %s", reason_of(error))
        log.debug("a task of an option has failed", exc_info=True)


class Options:
    """The options that run, in the order of the table.

    One that fails to say what CPUs a sandbox has, or to restore what it changed, is named, and
    affects neither the passes nor the other options: it may be of another package.
    """

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._running: dict[str, Running] = {}
        self._kinds: list[str] = []
        self._failures: dict[tuple[str, str, str], str] = {}
        """Why an option failed, by sandbox, option and method, until it no longer does."""
        self._left_out: dict[tuple[str, str], str] = {}
        """Whose metric has the name of an option's too, by option and metric."""

    def start(self, core: Core, due: Callable[[Option], bool]) -> list[Running]:
        """Start each option that is due and does not run yet; return these. Raises KataPinError."""
        new = [row for row in known(core.live.now) if row.name not in self._running and due(row)]
        started = {row.name: _started(row, core) for row in new}
        verbs: dict[str, str] = {}
        for name, option in (self._running | started).items():
            for verb in option.verbs():
                if (other := verbs.setdefault(verb, name)) != name:
                    raise ConfigError(f"its verb {verb!r} is one of option {other}", key=name)
        self._running |= started
        self._kinds += [finding.kind for row in new for finding in row.findings]
        return [*started.values()]

    def __iter__(self) -> Iterator[Running]:
        """Yield those that run."""
        return iter(self._running.values())

    def allot(self, containers: Sequence[Container]) -> Allotment:
        """Return a sandbox's containers with the CPUs that an option decides now to give them.

        Where it fails to decide, what it decided before holds. Raises StateError.
        """
        return self._decided(containers, "allot", "granted")

    def granted(self, containers: Sequence[Container]) -> Allotment:
        """Return the same as decided so far; decides nothing. Raises StateError."""
        return self._decided(containers, "granted")

    def _decided(self, containers: Sequence[Container], *methods: str) -> Allotment:
        """Return what the first option says that has a say, by the first method that works."""
        sandbox_id = containers[0].sandbox_id if containers else ""
        for name, option in self._running.items():
            for method in methods:
                key = sandbox_id, name, method
                try:
                    allotment: Allotment | None = getattr(option, method)(containers)
                except StateError:  # of the registry: the pass is tried again
                    raise
                except Exception as error:  # a fault barrier: an option may be of another package
                    if self._is_news(key, reason_of(error)):
                        why = "sandbox %s: option %s failed in %s: %s"
                        log.error(why, *key, reason_of(error))
                        log.debug("option %s failed", name, exc_info=True)
                    continue
                self._failures.pop(key, None)
                if allotment is not None:
                    return allotment
                break
        return nothing_allotted(containers)

    def _is_news(self, key: tuple[str, str, str], why: str) -> bool:
        """Keep why an option failed; return whether it did not fail so before."""
        if self._failures.get(key) == why:
            return False
        if known := {*self._sandboxes.ids}:  # without a daemon none is known
            known.add(key[0])
            self._failures = {one: its for one, its in self._failures.items() if one[0] in known}
        self._failures[key] = why
        return True

    def exclusive(self) -> CpuSet:
        """Return the pCPUs that options gave to containers exclusively."""
        return union(option.exclusive() for option in self)

    def notes(self, sandbox_id: str) -> Iterator[Note]:
        """Yield what an operator should know of a sandbox."""
        for (sandbox, name, method), why in tuple(self._failures.items()):
            if sandbox == sandbox_id:
                text = f"option {name} failed in {method}, so its CPUs may be out of date: {why}"
                yield Note("option-failed", text, NoteLevel.WARNING)
        for option in self:
            yield from option.notes(sandbox_id)

    def node_notes(self) -> Iterator[Note]:
        """Yield what an operator should know of the node."""
        for (name, metric), other in tuple(self._left_out.items()):
            text = f"metric {metric} of option {name} is not shown: {other} has one of that name"
            yield Note("option-metric", text, NoteLevel.WARNING)
        for option in self:
            yield from option.node_notes()

    def facts(self, sandbox_id: str) -> dict[str, Any]:
        """Return what a sandbox's document has of options, by fields of KnownSandbox."""
        return {key: value for one in self for key, value in one.facts(sandbox_id).items()}

    def state(self) -> dict[str, Any]:
        """Return what the state document has of them, by arguments of state_report."""
        return {key: value for one in self for key, value in one.state().items()}

    def thread(self, key: ThreadKey) -> dict[str, Any]:
        """Return what a thread's row has of them now, by fields of Thread."""
        return {name: value for one in self for name, value in one.thread(key).items()}

    def verbs(self) -> dict[str, Callable[[], Struct]]:
        """Return their documents by verb."""
        return {verb: make for one in self for verb, make in one.verbs().items()}

    def findings(self) -> Iterator[Finding]:
        """Yield what `check` reports of them."""
        for option in self:
            yield from option.findings()

    def violations(self) -> dict[str, int]:
        """Return how much is not as it should be now, by kinds of findings of `check`."""
        counts = dict.fromkeys(self._kinds, 0)
        for option in self:
            counts |= option.violations()
        return counts

    def metrics(self, taken: Iterable[str]) -> Iterator[Shown]:
        """Yield what they count; a metric is left out, and that is logged, if its name is taken."""
        owners = dict.fromkeys(taken, "kata-pin")
        for name, option in self._running.items():
            for row, value in option.metrics():
                other = owners.setdefault(row.name, f"option {name}")
                if other == f"option {name}":
                    yield row, value
                elif (name, row.name) not in self._left_out:
                    self._left_out[name, row.name] = other
                    log.error("metric %s of option %s is not shown: %s has one of that name",
                              row.name, name, other)  # fmt: skip

    async def give_back(self, ids: Collection[str] | None = None) -> dict[str, Any]:
        """Restore what was changed for these sandboxes, all of it if None.

        Returns what could not be restored, by fields of Applied.
        """
        kept: dict[str, Any] = {}
        failed: list[str] = []
        for name, option in self._running.items():
            try:
                answer = await option.give_back(ids)
                # TypeError for what Applied does not have, ValidationError for other types
                given = Applied(kind="unpin", sandboxes=(), **answer)
                found = convert(to_builtins(given), Applied)
                kept |= {one: (*kept.get(one, ()), *getattr(found, one)) for one in answer}
            except Exception as error:  # a fault barrier: each has its turn
                failed.append(f"option {name}: {reason_of(error)}")
                log.error("what an option changed is not restored: %s", failed[-1])
                log.debug("option %s failed", name, exc_info=True)
        return {**kept, "options_failed": (*kept.get("options_failed", ()), *failed)}


# What both the daemon and a command without a daemon are made of, built in order.


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
    threads = ThreadFinder(node, host, kata, finder.shims)
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
    return NriPlugin(
        intake,
        socket_path=nri.socket,
        name=nri.name,
        index=nri.index,
        wanted=nri.enabled is NriEnabled.YES,
        calls=calls,
    )
