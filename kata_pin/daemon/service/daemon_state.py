"""The `state` document of a running daemon."""

from __future__ import annotations

import os
import time

from kata_pin import __version__
from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.coordinator import Coordinator
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.status.allocation import allocation_report
from kata_pin.daemon.status.connections import metrics_report, nri_report
from kata_pin.daemon.status.documents import in_slices, state_report
from kata_pin.daemon.status.overview import Overview
from kata_pin.daemon.status.scrape import MetricsServer
from kata_pin.model.reports.daemon import Daemon
from kata_pin.sources.nri import NriPlugin


class DaemonState:
    """Makes the document; counts the daemon's uptime from its own construction."""

    def __init__(
        self,
        node: NodeWatch,
        overview: Overview,
        allocator: Allocator,
        coordinator: Coordinator,
        *,
        nri: NriPlugin | None,
        metrics: MetricsServer | None,
    ) -> None:
        """`nri` and `metrics` are None where the configuration switches them off."""
        self._started = time.monotonic()
        self._node = node
        self._overview = overview
        self._allocator = allocator
        self._coordinator = coordinator
        self._nri = nri
        self._metrics = metrics

    async def __call__(self, sandbox_id: str) -> bytes:
        """Return the encoded document as of now, of one sandbox if one is named."""
        state = state_report(
            node=self._node.current(),
            mode=self._node.config.mode.value,
            daemon=Daemon(
                running=True,
                pid=os.getpid(),
                version=__version__,
                uptime_s=round(time.monotonic() - self._started, 3),
                nri=nri_report(self._nri),
                metrics=metrics_report(self._metrics),
            ),
            node_notes=(*self._node.notes, *self._allocator.notes),
            allocation=allocation_report(
                self._allocator, self._coordinator.problems, self._coordinator.pusher
            ),
        )
        overview = self._overview
        chosen = overview.encoded_now(sandbox_id) if sandbox_id else overview.encoded()
        return await in_slices(state, chosen)
