"""Putting the parts together: what both the daemon and a command without a daemon need."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from kata_pin.config.tree import Config
from kata_pin.daemon.engine import Engine
from kata_pin.daemon.nodefacts import NodeWatch
from kata_pin.daemon.registry import Registry
from kata_pin.errors import ParseError, TaskGone
from kata_pin.host.files import read_text
from kata_pin.host.process import ProcessIndex, cgroups, cmdline, exe, read_process
from kata_pin.host.root import HostRoot
from kata_pin.model.sandbox import Container, ContainerState
from kata_pin.model.thread import ProcessKey
from kata_pin.sources.kataconfig import read_kata_configs
from kata_pin.vmm.allowlist import DEFAULT_EXECUTABLES
from kata_pin.vmm.facts import HostFacts
from kata_pin.vmm.find import NONE_KNOWN, VmmFinder
from kata_pin.vmm.statefiles import KataPaths, read_container_state, read_state, state_stamp
from kata_pin.wire.persist import KataRuntime, to_containers

log = logging.getLogger(__name__)

KTHREADD: Final = 2
"""The pid of the parent of all kernel threads."""

ADOPTED: Final = 0
"""What stands for a hook's pid in the identity of a record that is no message's."""

SETTLED_NS: Final = 1_000_000_000
"""A file changed less than a second ago may change again without a new time: clocks are coarse."""


_SOURCES: Final = {KataRuntime.GO: "persist.json", KataRuntime.RS: "state.json"}


@dataclass
class Parts:
    """The composed parts; they live as long as the configuration's paths."""

    root: HostRoot
    registry: Registry
    node: NodeWatch
    index: ProcessIndex
    finder: VmmFinder
    engine: Engine
    kata: KataPaths
    _stamps: dict[str, tuple[int, int]] = field(default_factory=dict)

    def adopt_all(self, known: Mapping[str, ProcessKey] = NONE_KNOWN) -> dict[str, int]:
        """Record what Kata keeps of every sandbox that runs; return how much was new, by id.

        `known` are the VMMs of the sandboxes that are known already.

        For sandboxes that existed before us, for messages that were lost with the daemon away and
        the disk full, and for updates, which no hook tells. Kata's files are read only where they
        changed since the last call.
        """
        running = self.finder.sandboxes(known)
        self._stamps = {one: stamp for one, stamp in self._stamps.items() if one in running}
        return {sandbox_id: self._adopt(sandbox_id) for sandbox_id in running}

    def _adopt(self, sandbox_id: str) -> int:
        stamp = state_stamp(self.root, self.kata, sandbox_id)
        if self._stamps.get(sandbox_id) == stamp:
            return 0
        persisted = read_state(self.root, self.kata, sandbox_id)
        if persisted is None:  # none there, or half written: the next audit looks again
            return 0
        if time.time_ns() - stamp[0] > SETTLED_NS:
            self._stamps[sandbox_id] = stamp
        states = {
            one.id: read_container_state(self.root, self.kata, sandbox_id, one.id)
            for one in persisted.containers
        }
        changed_ns = _boottime_of(stamp[0])
        try:
            found = to_containers(
                persisted, states=states, stamp_ns=changed_ns, source=_SOURCES[persisted.runtime]
            )
        except ParseError as error:  # one sandbox's annotations must not hide the others
            log.warning("sandbox %s: Kata's state not taken in: %s", sandbox_id, error)
            return 0
        new = sum(self._record(one, sandbox_id) for one in found)
        if persisted.runtime is KataRuntime.GO:
            new += self._record_gone({one.id for one in found}, sandbox_id, changed_ns)
        return new

    def _record(self, container: Container, sandbox_id: str) -> bool:
        """Record a container of Kata's state where it tells something new; return if it does.

        Its cpuset is the live one: hooks tell that of config.json, which no update changes, so it
        counts even where a hook came later. One that has stopped stays in Kata's state until it is
        deleted: a hook knows better.
        """
        known = self.registry.container(container.id)
        if container.sandbox_id != sandbox_id:
            return False
        if known is not None:
            if container.cpus is None or container.cpus == known.cpus or not known.state.counts:
                return False
            container = replace(container, state=known.state, kind=known.kind)
        self.registry.adopt(container)
        return True

    def _record_gone(self, listed: Collection[str], sandbox_id: str, changed_ns: int) -> int:
        """Record as deleted what Kata no longer keeps: its poststop was lost (DESIGN D8)."""
        gone = [
            replace(
                one, state=ContainerState.DELETED, source="persist.json", recorded_ns=changed_ns
            )
            for one in self.registry.containers(sandbox_id)
            if one.state.counts and one.id not in listed
        ]
        return sum(self.registry.record(one, stamp_ns=changed_ns, pid=ADOPTED) for one in gone)

    def served_by(self, pid: int, ppid: int) -> int:
        """Return the process that a new process works for: its parent, or a vhost worker's VMM.

        Before Linux 6.4 vhost workers are kernel threads called `vhost-<pid of the VMM>`.
        """
        if ppid != KTHREADD:
            return ppid
        try:
            name = read_process(self.root, pid).comm
        except TaskGone:
            return ppid
        owner = name.removeprefix("vhost-")
        return int(owner) if owner != name and owner.isdecimal() else ppid


def _boottime_of(mtime_ns: int) -> int:
    """Return a file's modification time on the hooks' clock; never later than now."""
    age_ns = max(0, time.time_ns() - mtime_ns)
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - age_ns


def compose(config: Config, registry: Registry) -> Parts:
    """Return the parts for this host; raises HostError without /proc."""
    root = HostRoot(debugfs=config.paths.debugfs)
    node = NodeWatch(root, config, live_threads=registry.live_threads())
    index = ProcessIndex(root)
    kata = KataPaths(vc=config.paths.vc, kata=config.paths.kata)
    host = HostFacts(
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
    engine = Engine(root, node, registry, index, host, finder, kata)
    return Parts(root, registry, node, index, finder, engine, kata)


def boot_id(root: HostRoot) -> str:
    """Return the kernel's id of this boot; raises OSError."""
    return read_text(root.proc("sys/kernel/random/boot_id")).strip()
