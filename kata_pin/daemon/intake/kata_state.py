"""Records what Kata itself keeps of a sandbox: its containers, and their present cpusets.

For sandboxes that are older than the daemon, for messages that were lost, and for updates, which no
hook reports. A file is read again if it changed, and whenever an event says that it was written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kata_pin.daemon.store.containers import Registry
from kata_pin.errors import HostError, ParseError
from kata_pin.host.process import ProcessIndex
from kata_pin.host.root import HostRoot
from kata_pin.model.sandbox import Container, ContainerState
from kata_pin.model.thread import ProcessKey
from kata_pin.vmm.find import NONE_KNOWN, VmmFinder
from kata_pin.vmm.state_files import (
    KataPaths,
    read_container_state,
    read_state,
    state_problem,
    state_stamp,
)
from kata_pin.wire.kata.persist import KataRuntime, to_containers

log = logging.getLogger(__name__)

SETTLED_NS: Final = 1_000_000_000
"""A file changed less than a second ago may change again without a new time: clocks are coarse."""

GONE: Final = "persist.json"
"""The source of a deletion that only the container's absence from Kata's state reports."""

_SOURCES: Final = {KataRuntime.GO: "persist.json", KataRuntime.RS: "state.json"}


@dataclass
class Adoption:
    """Records what Kata's files say."""

    _root: HostRoot
    _registry: Registry
    _kata: KataPaths
    _finder: VmmFinder
    _index: ProcessIndex
    _stamps: dict[str, tuple[int, int]] = field(default_factory=dict)
    _unread: dict[str, tuple[int, int]] = field(default_factory=dict)

    def running(self, known: Mapping[str, ProcessKey] = NONE_KNOWN) -> Collection[str]:
        """Return the sandboxes that have a VMM now; `known` are those known already."""
        self._index.refresh()
        return self._finder.sandboxes(known)

    def all(self, known: Mapping[str, ProcessKey] = NONE_KNOWN) -> dict[str, int]:
        """Record what Kata keeps of every sandbox that runs; return how much was new, by id.

        Files are read only where they changed since what they say was last recorded; StateError
        from the registry.
        """
        running = self.running(known)
        self._stamps = {one: stamp for one, stamp in self._stamps.items() if one in running}
        self._unread = {one: stamp for one, stamp in self._unread.items() if one in running}
        return {sandbox_id: self._changed(sandbox_id) for sandbox_id in running}

    def one(self, sandbox_id: str) -> int:
        """Record what Kata keeps of one sandbox, whatever the stamp; return how much was new."""
        return self._adopt(sandbox_id, state_stamp(self._root, self._kata, sandbox_id))

    def _changed(self, sandbox_id: str) -> int:
        stamp = state_stamp(self._root, self._kata, sandbox_id)
        return 0 if self._stamps.get(sandbox_id) == stamp else self._adopt(sandbox_id, stamp)

    def _adopt(self, sandbox_id: str, stamp: tuple[int, int]) -> int:
        try:
            persisted = read_state(self._root, self._kata, sandbox_id)
            if persisted is None:  # none, or half written: the next event or audit looks again
                self._log_unread(sandbox_id, stamp)
                return 0
            states = {
                one.id: read_container_state(self._root, self._kata, sandbox_id, one.id)
                for one in persisted.containers
            }
        except HostError as error:  # a passing reason: the next event or audit looks again
            log.warning("sandbox %s: Kata's state cannot be read now: %s", sandbox_id, error)
            return 0
        changed_ns = _boottime_of(stamp[0])
        try:
            found = to_containers(
                persisted, states=states, stamp_ns=changed_ns, source=_SOURCES[persisted.runtime]
            )
        except ParseError as error:  # one sandbox's annotations must not hide the others
            log.warning("sandbox %s: Kata's state not used: %s", sandbox_id, error)
            self._keep(sandbox_id, stamp)
            return 0
        with self._registry.transaction():  # a full disk leaves nothing half recorded
            new = sum(self._record(one, sandbox_id) for one in found)
            if persisted.lists_all_of(sandbox_id):
                new += self._record_gone({one.id for one in found}, sandbox_id, changed_ns)
        self._keep(sandbox_id, stamp)
        return new

    def _keep(self, sandbox_id: str, stamp: tuple[int, int]) -> None:
        """Remember that a file with this stamp is dealt with, if it can no longer change."""
        if _settled(stamp):
            self._stamps[sandbox_id] = stamp

    def _log_unread(self, sandbox_id: str, stamp: tuple[int, int]) -> None:
        """Log once per stamp that a file cannot be read, unless it is just being written."""
        if not any(stamp) or not _settled(stamp) or self._unread.get(sandbox_id) == stamp:
            return
        problem = state_problem(self._root, self._kata, sandbox_id)
        if problem and state_stamp(self._root, self._kata, sandbox_id) == stamp:
            self._unread[sandbox_id] = stamp
            log.warning("sandbox %s: Kata's state cannot be read: %s", sandbox_id, problem)

    def _record(self, container: Container, sandbox_id: str) -> bool:
        """Record a container of Kata's state; return whether anything in it is new.

        Its cpuset is the live one, to be weighed against other sources' (precedence.py). One
        that has stopped stays in Kata's state until it is deleted: a hook knows better. A record
        whose config.json was never read is corrected, and a deletion that only an earlier state
        without the container reported is undone.
        """
        known = self._registry.container(container.id)
        if container.sandbox_id != sandbox_id:
            return False
        if known is None or (known.state.counts and self._registry.is_unread(known.id)):
            return self._registry.adopt(container)
        if known.sandbox_id != sandbox_id:
            log.warning("sandbox %s: container %s belongs to another", sandbox_id, container.id)
            return False
        if known.state is ContainerState.DELETED and known.source == GONE:
            log.info("sandbox %s: container %s is in Kata's state again", sandbox_id, container.id)
            return self._registry.adopt(replace(container, kind=known.kind))
        if container.cpus is None or not known.state.counts:
            return False
        return self._registry.adopt(replace(container, state=known.state, kind=known.kind))

    def _record_gone(self, listed: Collection[str], sandbox_id: str, changed_ns: int) -> int:
        """Record as deleted what Kata no longer keeps: its poststop was lost (D8)."""
        gone = [
            replace(one, state=ContainerState.DELETED, source=GONE, recorded_ns=changed_ns)
            for one in self._registry.containers(sandbox_id)
            if one.state.counts and one.id not in listed
        ]
        return sum(self._registry.record(one, stamp_ns=changed_ns) for one in gone)


def _settled(stamp: tuple[int, int]) -> bool:
    return time.time_ns() - stamp[0] > SETTLED_NS


def _boottime_of(mtime_ns: int) -> int:
    """Return a file's modification time on the hooks' clock; never later than now."""
    age_ns = max(0, time.time_ns() - mtime_ns)
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - age_ns
