"""The node's facts as each pass needs them, and which exclusive pCPUs are whose."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, pcpus_are, union
from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.base.errors import HostError, KataPinError, is_transient
from kata_pin.base.placement import KubeletState, Node, Note, Placement, Report
from kata_pin.base.sandbox import Container
from kata_pin.base.sandbox import Sandbox as SandboxFacts
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import NoteLevel, ThreadRole
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.linux.cgroup_mounts import CgroupMount, cgroup_mounts
from kata_pin.linux.files import HostRoot
from kata_pin.linux.tasks import get_affinity
from kata_pin.linux.topology import isolated, online, read_topology
from kata_pin.peers.kubelet.checkpoint import read_claims, read_kubelet
from kata_pin.placement.masks import Conflict, conflicts
from kata_pin.placement.owners import Known, Owner
from kata_pin.records.history import NodeEvents

log = logging.getLogger(__name__)


# The topology is read again when online or isolated CPUs change, the kubelet's checkpoint when its
# file does. DRA claims are read when an event says so, and in audits.


class NodeWatch:
    """Gives the current Node; `notes` says what could not be read."""

    def __init__(self, root: HostRoot, live: LiveConfig, *, live_threads: bool) -> None:
        """`live_threads`: whether new threads are reported as they are born (D11)."""
        self.live_threads = live_threads
        self._live = live
        self._root = root
        self._topology: HostTopology | None = None
        self._kubelet: KubeletState | None = None
        self._kubelet_stamp: tuple[int, int, int] | None = None
        self._kubelet_problem = ""
        self._claims: Mapping[str, CpuSet] | None = None
        self._claims_problem = ""
        self._seen: tuple[CpuSet, CpuSet, KubeletState | None, Mapping[str, CpuSet]] | None = None
        self._last: Node | None = None
        """The same object while it is equal: every sandbox keeps the one it was decided by."""
        self._cgroup_mounts: tuple[CgroupMount, ...] | None = None

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self._live.now

    @property
    def notes(self) -> tuple[Note, ...]:
        """What the operator should know about the node."""
        problems = (
            ("kubelet-checkpoint", self._kubelet_problem),
            ("dra-claims", self._claims_problem),
        )
        return tuple(Note(code, text, NoteLevel.WARNING) for code, text in problems if text)

    def current(self) -> Node:
        """Return the node as it is now; raises HostError when sysfs cannot be read at all."""
        topology = self._current_topology()
        node = Node(
            topology=topology,
            settings=self.config.placement,
            kubelet=self.kubelet,
            claims=self.claims,
            release_mask=self._release_mask(topology),
            live_threads=self.live_threads,
        )
        if node != self._last:
            self._last = node
        return self._last

    @property
    def last(self) -> Node:
        """The node as the last `current` found it: what the last pass used."""
        return self._last or self.current()

    @property
    def cgroup_mounts(self) -> tuple[CgroupMount, ...]:
        """Where cgroups are mounted, read again after each `changed`.

        A node with 250 pods has thousands of mounts, and those of cgroups do not change.
        """
        if self._cgroup_mounts is None:
            self._cgroup_mounts = cgroup_mounts(self._root)
        return self._cgroup_mounts

    def changed(self) -> bool:
        """Whether CPUs, the kubelet's state or DRA claims changed since the last call."""
        self._cgroup_mounts = None
        before = self._seen
        topology = self._current_topology()
        self.read_claims()
        self._seen = (topology.online, topology.isolated, self.kubelet, self.claims)
        return before is not None and before != self._seen

    def _current_topology(self) -> HostTopology:
        now = (online(self._root), isolated(self._root))
        known = self._topology
        if known is None or (known.online, known.isolated) != now:
            known = self._topology = read_topology(self._root)
        return known

    def _release_mask(self, topology: HostTopology) -> CpuSet:
        """Return pid 1's affinity, else all online CPUs (D18)."""
        try:
            unconfined = get_affinity(1, self._root)
        except HostError:
            return topology.online
        return unconfined & topology.online or topology.online

    @property
    def kubelet(self) -> KubeletState | None:
        """The kubelet's assignments as of now; the last valid ones while its file is damaged."""
        path = self.config.paths.kubelet_state
        try:
            status = self._root.calls.stat(path)
            stamp = (status.modified_ns, status.inode, status.size)
        except OSError as error:
            if not is_transient(error):
                self._kubelet, self._kubelet_stamp, self._kubelet_problem = None, None, ""
            return self._kubelet
        if stamp != self._kubelet_stamp and self._read_kubelet(path):
            self._kubelet_stamp = stamp
        return self._kubelet

    @property
    def claims(self) -> Mapping[str, CpuSet]:
        """The CPUs of DRA claims as last read, by the claim's uid."""
        if self._claims is None:
            self.read_claims()
        return self._claims or {}

    def read_claims(self) -> bool:
        """Read the DRA claims; return whether they changed.

        Claims whose spec cannot be read now stay as they were.
        """
        before = self._claims or {}
        try:
            found, problem = read_claims(self.config.paths.cdi, self._root.calls)
        except KataPinError as error:
            found, problem = {}, str(error)
        if problem and problem != self._claims_problem:
            log.warning("DRA claims: %s", problem)
        self._claims_problem = problem
        self._claims = {**before, **found} if problem else found
        return self._claims != before

    def _read_kubelet(self, path: str) -> bool:
        """Read the checkpoint; a damaged one leaves the last valid one in use.

        Return whether the file needs no reading again until it changes.
        """
        try:
            self._kubelet = read_kubelet(path, self._root.calls)
            self._kubelet_problem = ""
        except KataPinError as error:
            kept = "using the last valid one" if self._kubelet else "no valid one is known"
            problem = f"{error}; {kept}"
            if problem != self._kubelet_problem:
                log.warning("kubelet checkpoint ignored: %s", problem)
            self._kubelet_problem = problem
            return not isinstance(error.__cause__, OSError)
        return True


# Which pCPUs are watched and whose every thread is, as the last passes left them.


class Watched(NamedTuple):
    """A pCPU of a sandbox: its paired vCPU, and the other threads that may run there only.

    Paired by kata-pin, or by Kata itself (D13). `shared`: further threads of the sandbox may run
    there too.
    """

    sandbox: str
    cpu: int
    vcpus: tuple[ThreadKey, ...]
    others: tuple[ThreadKey, ...]
    shared: bool

    @property
    def threads(self) -> tuple[ThreadKey, ...]:
        """All that may run there only."""
        return self.vcpus + self.others


def _watched(sandbox_id: str, report: Report) -> Iterator[Watched]:
    """Yield what one pass over a sandbox left."""
    paired: dict[int, list[ThreadKey]] = {}
    alone: dict[int, list[ThreadKey]] = {}
    shared = 0
    for key, (cpus, is_paired) in _places(report).items():
        if len(cpus) == 1:
            kind = paired if is_paired else alone
            kind.setdefault(cpus.first, []).append(key)
        else:
            shared |= cpus.bits
    for cpu, keys in sorted(paired.items()):
        others = tuple(alone.get(cpu, ()))
        yield Watched(sandbox_id, cpu, tuple(keys), others, bool(shared >> cpu & 1))


@dataclass
class PcpuOwners:
    """Derives both from the table of sandboxes; what a report says is derived once."""

    _sandboxes: Sandboxes
    _containers: Callable[[str], tuple[Container, ...]]

    def __post_init__(self) -> None:
        self._known: dict[str, tuple[Report, tuple[Watched, ...]]] = {}

    def watched(self) -> Iterator[Watched]:
        """Yield the exclusive pCPUs that have a vCPU of their own, unless a pass is under way."""
        ids = self._sandboxes.ids
        self._known = {one: self._known[one] for one in ids if one in self._known}
        for sandbox_id in ids:
            cache = self._sandboxes.cache(sandbox_id)
            if cache is None or cache.report is None or cache.passing:
                continue
            known = self._known.get(sandbox_id)
            if known is None or known[0] is not cache.report:
                watched = tuple(_watched(sandbox_id, cache.report))
                known = self._known[sandbox_id] = cache.report, watched
            yield from known[1]

    def is_passing(self, sandbox_id: str) -> bool:
        """Whether a pass over a sandbox is under way, so that `watched` leaves it out."""
        cache = self._sandboxes.cache(sandbox_id)
        return cache is not None and cache.passing

    def owner(self, sandbox_id: str, cpu: int) -> Owner:
        """Return the owner of a pCPU with all threads that are placed there."""
        own: dict[int, str] = {}
        report = self._report(sandbox_id)
        if report is not None:
            labels = {thread.key: thread.label for thread in report.threads}
            for key, (cpus, _) in _places(report).items():
                if cpu in cpus:
                    own[key.tid] = labels.get(key, "")
        return Owner(cpu, sandbox_id, self.pod(sandbox_id), self._container(sandbox_id, cpu), own)

    def known(self) -> Known:
        """Return whose each thread, process and container is."""
        threads: dict[int, str] = {}
        processes: dict[int, str] = {}
        containers: dict[str, str] = {}
        pods: dict[str, str] = {}
        masks: dict[str, CpuSet] = {}
        for sandbox_id in self._sandboxes.ids:
            report = self._report(sandbox_id)
            for thread in report.threads if report is not None else ():
                threads[thread.key.tid] = processes[thread.key.tgid] = sandbox_id
            containers[sandbox_id] = sandbox_id
            containers |= {one.id: sandbox_id for one in self._containers(sandbox_id)}
            pods[sandbox_id] = self.pod(sandbox_id)
            if report is not None and report.placement is not None:
                masks[sandbox_id] = report.placement.mask.mask or EMPTY
        return Known(threads, processes, containers, pods, masks)

    def exclusive(self) -> CpuSet:
        """Return every exclusive pCPU."""
        reports = (self._report(one) for one in self._sandboxes.ids)
        return union(one.placement.mask.exclusive for one in reports if one and one.placement)

    def placements(self) -> dict[str, Placement]:
        """Return what the last pass over each sandbox decided."""
        reports = ((one, self._report(one)) for one in self._sandboxes.ids)
        return {one: found.placement for one, found in reports if found and found.placement}

    def titled(self, sandbox_id: str) -> str:
        """Return a sandbox's pod with its id, only the id where no pod is known."""
        pod = self.pod(sandbox_id)
        return pod if pod == sandbox_id else f"{pod} (sandbox {sandbox_id})"

    def pod(self, sandbox_id: str) -> str:
        """Return a sandbox's pod, its id where none is known."""
        return SandboxFacts(sandbox_id, self._containers(sandbox_id)).pod

    def _container(self, sandbox_id: str, cpu: int) -> str:
        report = self._report(sandbox_id)
        claims = report.placement.mask.claims if report and report.placement else ()
        owner = next((one.container_id for one in claims if cpu in one.exclusive), "")
        return next((c.name for c in self._containers(sandbox_id) if c.id == owner), "")

    def _report(self, sandbox_id: str) -> Report | None:
        cache = self._sandboxes.cache(sandbox_id)
        return None if cache is None else cache.report


def _places(report: Report) -> dict[ThreadKey, tuple[CpuSet, bool]]:
    """Return where each thread was placed, and whether it is a vCPU with that place for itself.

    A vCPU that others pin, as Kata can, is where it may run.
    """
    if report.placement is None:
        return {}
    desired, exclusive = report.placement.desired, report.placement.mask.exclusive
    places = {key: (one.applied, one.paired) for key, one in desired.items() if not one.release}
    for thread in report.threads:
        if thread.role.role is ThreadRole.VCPU and thread.key not in desired:
            cpus = thread.task.affinity
            places[thread.key] = cpus, cpus <= exclusive
    return places


# Reports pCPUs that are exclusive to several sandboxes, when that begins and when it ends.
#
# Compared after each audit, not after each pass: between the end of a pod and the pass that sees
# it, a new pod may have its CPUs already. Not counted: `kata_pin_violations` has how many there
# are.

MOST: Final = 16
"""Most conflicts that one audit reports; the others follow with the next."""

NAMED: Final = 4
"""Most sandboxes that are named."""


@dataclass
class _Known:
    """A pCPU of several sandboxes: their ids, their names in words, and since when."""

    sandboxes: frozenset[str]
    names: str
    since: float


@dataclass
class ExclusiveConflicts:
    """Compares what sandboxes claim with the last time."""

    _claims: PcpuOwners
    _events: NodeEvents
    _known: dict[int, _Known] = field(default_factory=dict)

    def look(self) -> None:
        """Report conflicts that are new, or have a new sandbox, and those that ended."""
        found = conflicts(self._claims.placements())
        now = {cpu for one in found for cpu in one.cpus}
        self._end(CpuSet(self._known.keys() - now))
        for conflict in islice(filter(self._is_new, found), MOST):
            self._begin(conflict)

    def _is_new(self, conflict: Conflict) -> bool:
        """Whether one of its sandboxes is new to one of its pCPUs."""
        known = (self._known.get(cpu) for cpu in conflict.cpus)
        return any(one is None or not one.sandboxes.issuperset(conflict.sandboxes) for one in known)

    def _begin(self, conflict: Conflict) -> None:
        names = self._names(conflict.sandboxes)
        for cpu in conflict.cpus:
            before = self._known.get(cpu)
            since = before.since if before else time.monotonic()
            self._known[cpu] = _Known(frozenset(conflict.sandboxes), names, since)
        self._events.report(
            NodeEventKind.EXCLUSIVE_CONFLICT,
            "%s exclusive to %s: each waits while another runs there; give all but one of them "
            "other CPUs (`kata-pin explain` says where each claim is known from)",
            pcpus_are(conflict.cpus),
            names,
            counts=False,
            cpus=str(conflict.cpus),
        )

    def _end(self, cpus: CpuSet) -> None:
        ended: dict[str, list[int]] = {}
        since = {cpu: self._known[cpu].since for cpu in cpus}
        for cpu in cpus:
            ended.setdefault(self._known.pop(cpu).names, []).append(cpu)
        for names, numbers in ended.items():
            self._events.report(
                NodeEventKind.EXCLUSIVE_CONFLICT,
                "%s no longer exclusive to %s, after %.0f s",
                pcpus_are(CpuSet(numbers)),
                names,
                time.monotonic() - min(since[cpu] for cpu in numbers),
                level=logging.INFO,
                counts=False,
                cpus=str(CpuSet(numbers)),
            )

    def _names(self, sandboxes: tuple[str, ...]) -> str:
        """Return the sandboxes in words."""
        named = [self._claims.titled(one) for one in sandboxes[:NAMED]]
        more = len(sandboxes) - len(named)
        named += [f"{more} more"] * bool(more)
        both = "both " if len(named) == 2 else ""
        return f"{both}{', '.join(named[:-1])} and {named[-1]}"
