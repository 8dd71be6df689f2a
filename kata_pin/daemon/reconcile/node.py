"""The node's facts as each pass needs them, read again only where they may have changed.

The topology is read again when online or isolated CPUs change, the kubelet's checkpoint when its
file does. DRA claims are read when an event says so, and in audits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kata_pin.config.tree import Config
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.errors import HostError, KataPinError, is_transient
from kata_pin.host.cgroup_mounts import CgroupMount, cgroup_mounts
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import get_affinity
from kata_pin.host.topology import isolated, online, read_topology
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node import KubeletState, Node
from kata_pin.model.placement import Note, NoteLevel
from kata_pin.model.topology import HostTopology
from kata_pin.sources.claims import read_claims
from kata_pin.sources.kubelet import read_kubelet

log = logging.getLogger(__name__)


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
        self._last = Node(
            topology=topology,
            settings=self.config.placement,
            kubelet=self.kubelet,
            claims=self.claims,
            release_mask=self._release_mask(topology),
            live_threads=self.live_threads,
        )
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

    def set_live_threads(self, *, live: bool) -> None:
        """Know from now on whether new threads are reported as they are born."""
        self.live_threads = live

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
