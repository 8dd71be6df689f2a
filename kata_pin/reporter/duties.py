"""What a reporter does beside its own object, where the chart's values say so.

Both need a right on objects that others own, so both are off by default: removing a startup taint
from the node, and publishing the allocator's free pCPUs as a NodeResourceTopology.
"""

from __future__ import annotations

import http.client
import logging
from dataclasses import dataclass, field, replace

from kata_pin.model.node_topology import Zone
from kata_pin.model.reports.state import State
from kata_pin.policy.node_topology import topology_zones
from kata_pin.reporter.api import ApiRefused, ApiServer

log = logging.getLogger(__name__)


@dataclass
class StartupTaint:
    """A taint that keeps pods away until the node is ready; removed once per run."""

    api: ApiServer
    node: str
    key: str
    _done: bool = False

    async def run(self, *, ready: bool) -> None:
        """Remove the taint if the node is ready; raises ApiRefused, StateError."""
        if self._done or not ready:
            return
        if await self.api.remove_taint(self.node, self.key):
            log.info("removed the taint %s of node %s", self.key, self.node)
        self._done = True


@dataclass
class Topology:
    """The node's NodeResourceTopology, unless somebody else writes its zones."""

    api: ApiServer
    node: str
    node_uid: str
    other_writer: str = ""
    """Who writes the object; nothing is written from then on."""
    _zones: tuple[Zone, ...] = ()
    _written: tuple[Zone, ...] = ()
    _checked: bool = field(default=False, init=False)

    def look(self, state: State) -> None:
        """Take in the daemon's state; where it allocates no more, nothing is free by it."""
        nothing_free = tuple(replace(one, available=0) for one in self._written)
        self._zones = topology_zones(state) or nothing_free

    async def run(self) -> None:
        """Write the zones if they changed; raises ApiRefused, StateError."""
        if self.other_writer or not self._zones or self._zones == self._written:
            return
        try:
            # the object of another writer is not even merged with: it may list zones by name
            if not self._checked:
                self.other_writer = await self.api.topology_writer(self.node)
                self._checked = True
            if not self.other_writer:
                await self.api.apply_topology(self.node, self.node_uid, self._zones)
                self._written = self._zones
        except ApiRefused as error:
            if error.status == http.client.NOT_FOUND:
                log.warning("the cluster has no NodeResourceTopology: its definition is missing")
                self._written = self._zones  # tried again when something changes
                return
            if error.status != http.client.CONFLICT:
                raise
            self.other_writer = "another manager of its fields"
        if self.other_writer:
            log.warning(
                "NodeResourceTopology of %s is written by %s: kata-pin leaves it alone",
                self.node,
                self.other_writer,
            )
