"""The node's facts as each pass needs them, read again only where they may have changed.

The topology is read again when online or isolated CPUs change, the kubelet's checkpoint when its
file does.
"""

from __future__ import annotations

import logging
import os

from kata_pin.config.tree import Config
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.errors import HostError, KataPinError
from kata_pin.host.cpuset import CgroupMount, cgroup_mounts
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import get_affinity
from kata_pin.host.topology import isolated, online, read_topology
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node import KubeletState, Node
from kata_pin.model.placement import Note, NoteLevel
from kata_pin.model.topology import HostTopology
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
        self._seen: tuple[CpuSet, CpuSet, KubeletState | None] | None = None
        self._last: Node | None = None
        self._cgroup_mounts: tuple[CgroupMount, ...] | None = None

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self._live.now

    @property
    def notes(self) -> tuple[Note, ...]:
        """What the operator should know about the node."""
        if not self._kubelet_problem:
            return ()
        return (Note("kubelet-checkpoint", self._kubelet_problem, NoteLevel.WARNING),)

    def current(self) -> Node:
        """Return the node as it is now; raises HostError when sysfs cannot be read at all."""
        topology = self._current_topology()
        self._last = Node(
            topology=topology,
            settings=self.config.placement,
            kubelet=self.kubelet,
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
        """Whether online or isolated CPUs or the kubelet's state changed since the last call."""
        self._cgroup_mounts = None
        before = self._seen
        topology = self._current_topology()
        self._seen = (topology.online, topology.isolated, self.kubelet)
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
            status = os.stat(path)
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
        except OSError:
            self._kubelet, self._kubelet_stamp, self._kubelet_problem = None, None, ""
            return None
        if stamp != self._kubelet_stamp:
            self._kubelet_stamp = stamp
            self._read_kubelet(path)
        return self._kubelet

    def _read_kubelet(self, path: str) -> None:
        """Read the checkpoint; a damaged one leaves the last valid one in use."""
        try:
            self._kubelet = read_kubelet(path)
            self._kubelet_problem = ""
        except KataPinError as error:
            kept = "using the last valid one" if self._kubelet else "no valid one is known"
            self._kubelet_problem = f"{error}; {kept}"
            log.warning("kubelet checkpoint ignored: %s; %s", error, kept)
