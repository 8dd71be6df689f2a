"""What is known of one sandbox between two passes.

This includes other writers of its affinities, and whether Kata pins it too (D13).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, TypeVar

from msgspec import Struct
from msgspec import field as msgspec_field

from kata_pin.base.allocation import RDT_KEY
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.documents.state import Writer
from kata_pin.base.errors import KataPinError
from kata_pin.base.placement import ActionResult, Binding, Placement, Report
from kata_pin.base.sandbox import Container, Thread, Vmm
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import Outcome
from kata_pin.linux.files import HostRoot
from kata_pin.linux.tasks import TaskReader
from kata_pin.peers.kata import KataConfigFile
from kata_pin.peers.oci import KATA_CONFIG, KATA_PINNING, parse_config, quiet_keys
from kata_pin.peers.qemu import QmpAnswers
from kata_pin.placement.drift import NO_KATA_PINNING, KataPinning, KataPinningMode
from kata_pin.placement.notes import KATA_PINS_VCPUS
from kata_pin.placement.place import OthersCpus
from kata_pin.records.bundles import BundleReader
from kata_pin.vmm.find import Helper
from kata_pin.vmm.role_cache import RoleCache
from kata_pin.vmm.state_files import KataPaths, digest, forget_state, state_stamp

log = logging.getLogger(__name__)


# Other writers of a sandbox's affinities: detect them, back off from them, report them (D13).
#
# A thread that was pinned and found elsewhere three times within a minute has another writer.
# kata-pin then leaves it alone, each time for longer, so that two writers never fight in a tight
# loop; the other threads stay pinned. An event about the sandbox ends the back-off.

RETURNS: Final = 3
WINDOW_S: Final = 60.0
FIRST_BACK_OFF_S: Final = 30.0
LONGEST_BACK_OFF_S: Final = 600.0


@dataclass
class _Watch:
    """What was seen of one thread."""

    first: float
    times: list[float] = field(default_factory=list)
    until: float = 0.0
    back_off_s: float = FIRST_BACK_OFF_S
    seen: int = 0
    last: float = 0.0
    has_writer: bool = False


class OtherWriters:
    """The drifts of one sandbox's threads; times are those of any one monotonic clock."""

    def __init__(self) -> None:
        self.asked: dict[ThreadKey, CpuSet] = {}
        """What each thread was given last, until an event: one that something narrows since is
        left (placement/drift.py)."""
        self._threads: dict[ThreadKey, _Watch] = {}

    def given(self, placement: Placement, threads: Iterable[Thread]) -> None:
        """Note which threads have the CPUs that they should have, after a pass that sets them."""
        desired = placement.desired
        for task, _role in threads:
            found = desired.get(task.key)
            if found is not None and found.applied == task.affinity:
                self.asked[task.key] = found.applied

    def applied(self, results: Iterable[ActionResult]) -> None:
        """Note what threads were set to, also those that got less."""
        for one in results:
            if one.outcome in {Outcome.DONE, Outcome.CLIPPED}:
                self.asked[one.action.key] = one.action.target

    def drifted(self, keys: Iterable[ThreadKey], now: float) -> None:
        """Note threads that were pinned and have moved since."""
        for key in keys:
            watch = self._threads.setdefault(key, _Watch(first=now))
            watch.seen += 1
            watch.last = now
            if now < watch.until:
                continue
            watch.times = [t for t in watch.times if now - t < WINDOW_S] + [now]
            if len(watch.times) >= RETURNS:
                watch.times = []
                watch.has_writer = True
                watch.until = now + watch.back_off_s
                watch.back_off_s = min(watch.back_off_s * 2, LONGEST_BACK_OFF_S)

    def backed_off(self, now: float) -> frozenset[ThreadKey]:
        """Return the threads that are left to another writer for now."""
        return frozenset(key for key, watch in self._threads.items() if now < watch.until)

    def retry_at(self) -> float:
        """Return when the first back-off ends; 0 without one."""
        return min((one.until for one in self._threads.values() if one.until), default=0.0)

    def writer(self, now: float) -> Writer | None:
        """Return the other writer, also between back-offs; None for ordinary drift."""
        known = {key: watch for key, watch in self._threads.items() if watch.has_writer}
        if not known:
            return None
        first = min(watch.first for watch in known.values())
        return Writer(
            name="other",
            active=bool(self.backed_off(now)),
            evidence="drift that returns",
            count=sum(one.seen for one in known.values()),
            since_s=round(max(0.0, now - first), 3),
            tids=tuple(sorted(key.tid for key in known)),
            last_s=round(max(0.0, now - max(one.last for one in known.values())), 3),
        )

    def ended(self, now: float) -> bool:
        """Whether a back-off has ended since the last call: the placement is due again."""
        over = [watch for watch in self._threads.values() if 0 < watch.until <= now]
        for watch in over:
            watch.until = 0.0
        return bool(over)

    def forget(self) -> None:
        """End every back-off: something changed, so the placement is asserted again (D13)."""
        self.asked.clear()
        for watch in self._threads.values():
            watch.times = []
            watch.until = 0.0

    def keep_only(self, keys: Iterable[ThreadKey]) -> None:
        """Drop threads that are gone."""
        alive = set(keys)
        self._threads = {key: one for key, one in self._threads.items() if key in alive}
        self.asked = {key: cpus for key, cpus in self.asked.items() if key in alive}


class SandboxCache(Struct):
    """What is known of one sandbox between passes; all of it can be found again.

    Lives as long as its sandbox.
    """

    roles: RoleCache = msgspec_field(default_factory=RoleCache)
    tasks: TaskReader = msgspec_field(default_factory=TaskReader)
    vmm: Vmm | None = None
    problem: str = ""
    qmp: QmpAnswers | None = None
    asked: frozenset[ThreadKey] = frozenset()
    """The threads that `qmp` was asked about: they lived before."""

    report: Report | None = None
    checked_at: float = 0.0
    confined: list[ActionResult] = msgspec_field(default_factory=list)
    """What new threads were set to since the last pass (follow/threads.py), for its next report."""

    passing: bool = False
    """Whether a pass is under way: threads need not be where `report` says."""

    same_processes: bool = False
    """Whether the pass under way need not look for other processes than the last one did."""

    other_writers: OtherWriters = msgspec_field(default_factory=OtherWriters)
    kata: KataPinning = NO_KATA_PINNING
    configured: CpuSet = EMPTY
    """The cpuset configured for the sandbox's cgroup, where a pass needed it."""

    decided: tuple[object, Sequence[Thread], Placement] | None = None
    """All that the last placement was decided from, and the placement."""

    trial: Binding | None = None
    """A binding that a pass that sets nothing goes by, in place of the one that holds."""

    others: OthersCpus | None = None
    """What others have exclusively, for a pass without the daemon; None: the daemon's own pass."""

    helpers: tuple[object, tuple[Helper, ...]] | None = None
    """The helpers that were found last, and what they were found by."""

    @property
    def unsure(self) -> bool:
        """Whether a thread may soon turn out to be a vCPU; no event reports that."""
        return self.vmm is not None and self.roles.unsure(
            self.vmm.guest.boot, self.vmm.guest.maximum
        )

    @property
    def may_grow(self) -> bool:
        """Whether the VM may get another vCPU."""
        return self.vmm is not None and self.roles.may_grow(self.vmm.guest.maximum)

    @property
    def processes(self) -> frozenset[int]:
        """The pids whose threads the last pass read."""
        threads = self.report.threads if self.report is not None else ()
        return frozenset([task.key.tgid for task, _role in threads])

    def writers(self, now: float) -> tuple[Writer, ...]:
        """Return the other writers of the sandbox's affinities, Kata first; `now` is monotonic."""
        found: list[Writer] = []
        if self.kata.mode is not KataPinningMode.OFF:
            placement = self.report.placement if self.report is not None else None
            active = placement is not None and any(
                note.code == KATA_PINS_VCPUS for note in placement.notes
            )
            how = " by NUMA node" if self.kata.mode is KataPinningMode.NUMA else ""
            evidence = f"enable_vcpus_pinning{how}, by {self.kata.evidence}"
            found.append(Writer("kata", active, evidence, count=0, since_s=None, tids=()))
        other = self.other_writers.writer(now)
        return (*found, other) if other is not None else tuple(found)


# Whether Kata pins a sandbox's vCPUs too, and the evidence (D13).
#
# The first that answers: Kata's state of the sandbox (persist.json, state.json: its own result of
# all below), the annotation, the configuration file. Facts, read in Kata's sources:
#
# - Go reads `io.katacontainers.enable_vcpus_pinning` (pkg/oci/utils.go), runtime-rs
#   `io.katacontainers.config.runtime.enable_vcpus_pinning` (kata-types, annotations).
# - `enable_annotations` of a configuration rules over `io.katacontainers.config.hypervisor.*`
#   alone, in both runtimes; neither key is one of those, so both always count. What does decide is
#   whether containerd or CRI-O hand the pod's annotations on, and that shows in config.json. So a
#   config.json that can be read and lacks the key is an answer; only without it the pod's own
#   count.
# - A configuration is a sandbox's when it allows its VMM's executable, or is the one that
#   `io.katacontainers.config_path` names. Several that disagree say nothing.

T = TypeVar("T")

MAX_REMEMBERED: Final = 4096
"""Sandboxes whose answers are kept; more than a node has."""

Answer = tuple[bool, str]
"""Whether Kata's pinning is on, and the evidence."""

_FLAGS: Final = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}
"""What Go's strconv.ParseBool takes; Kata refuses a sandbox with anything else."""


class KataPinningReader(Struct, frozen=True):
    """Reads whether Kata pins; what never changes is read once.

    `files` are Kata's configurations as they were when the daemon started.
    """

    root: HostRoot
    paths: KataPaths
    bundles: BundleReader
    files: Sequence[KataConfigFile]
    _annotated: dict[str, Mapping[str, str]] = msgspec_field(default_factory=dict)
    _reported: dict[str, Mapping[str, str]] = msgspec_field(default_factory=dict)
    _last: dict[str, Answer] = msgspec_field(default_factory=dict)

    def of(self, sandbox_id: str, containers: Iterable[Container], vmm: Vmm) -> KataPinning:
        """Return what Kata does with the sandbox's vCPUs: by NUMA where it bound guest memory.

        It is the shim that pins: without one nothing of Kata's is left to do it.
        """
        if vmm.orphan:
            return NO_KATA_PINNING
        on, evidence = self._answer(sandbox_id, containers, vmm)
        if not on:
            return KataPinning(KataPinningMode.OFF, evidence)
        mode = KataPinningMode.NUMA if vmm.guest.host_nodes else KataPinningMode.COUNT
        return KataPinning(mode, evidence)

    @property
    def hot_plug(self) -> bool:
        """Whether a configuration lets VFIO devices be added to a VM that runs."""
        return any(table.hot_plug_vfio for file in self.files for table in file.configs)

    def take_annotations(self, sandbox_id: str, annotations: Mapping[str, str]) -> None:
        """Take a pod's annotations as NRI reports them."""
        ours = _ours(annotations)
        if ours:
            _remember(self._reported, sandbox_id, ours)

    def annotations(self, sandbox_id: str, containers: Iterable[Container]) -> Mapping[str, str]:
        """Return a pod's annotations that matter here, from config.json and from NRI's report."""
        created, _ = self._annotations(sandbox_id, containers)
        return {**self._reported.get(sandbox_id, {}), **created}

    def forget(self, sandbox_id: str) -> None:
        """Drop what was kept of a sandbox that ended."""
        for kept in (self._annotated, self._reported, self._last):
            kept.pop(sandbox_id, None)
        forget_state(self.root, self.paths, sandbox_id)

    def _answer(self, sandbox_id: str, containers: Iterable[Container], vmm: Vmm) -> Answer:
        persisted = digest(self.root, self.paths, sandbox_id).pinning
        if persisted is not None:
            _remember(self._last, sandbox_id, persisted)
            return persisted
        if sandbox_id in self._last and any(state_stamp(self.root, self.paths, sandbox_id)):
            return self._last[sandbox_id]  # it is being written: use the previous answer
        annotations, place = self._annotations(sandbox_id, containers)
        for key in KATA_PINNING:
            value = _FLAGS.get(annotations.get(key, ""))
            if value is not None:
                return value, f"annotation {key} in {place}"
        return self._configured(annotations.get(KATA_CONFIG, ""), vmm)

    def _annotations(
        self, sandbox_id: str, containers: Iterable[Container]
    ) -> tuple[Mapping[str, str], str]:
        """Return the annotations that the sandbox was created with, and their source."""
        if sandbox_id in self._annotated:
            return self._annotated[sandbox_id], "config.json"
        for container in containers:
            if container.id == sandbox_id and container.bundle:
                try:
                    config = parse_config(self.bundles.read_config(container.bundle))
                except KataPinError as error:
                    log.debug("sandbox %s: %s", sandbox_id, error)
                    continue
                _remember(self._annotated, sandbox_id, _ours(config.annotations))
                return config.annotations, "config.json"
        return self._reported.get(sandbox_id, {}), "the pod"

    def _configured(self, named: str, vmm: Vmm) -> Answer:
        """Return what Kata's configuration says about sandboxes with this VMM."""
        found = {
            file.path: config.vcpu_pinning
            for file in self.files
            for config in file.configs
            if _is_meant(file, config.binaries, named, vmm)
        }
        if not any(found.values()):
            return False, ""
        if not all(found.values()):
            return False, f"{len(found)} Kata configurations that disagree"
        return True, ", ".join(found)


def _ours(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """Return those that matter here: others may be long."""
    kept = (*KATA_PINNING, KATA_CONFIG, RDT_KEY, *quiet_keys(annotations))
    return {key: annotations[key] for key in kept if key in annotations}


def _is_meant(file: KataConfigFile, binaries: Sequence[str], named: str, vmm: Vmm) -> bool:
    if named.startswith("/"):
        return file.path == os.path.realpath(named)
    jailed = (f"/{os.path.basename(pattern)}" for pattern in binaries)  # as it is seen in a jail
    return any(fnmatchcase(vmm.exe, pattern) for pattern in (*binaries, *jailed))


def _remember(kept: dict[str, T], sandbox_id: str, value: T) -> None:
    if len(kept) >= MAX_REMEMBERED and sandbox_id not in kept:
        del kept[next(iter(kept))]
    kept[sandbox_id] = value
