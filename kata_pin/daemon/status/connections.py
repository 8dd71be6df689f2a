"""The daemon's own connections as the state document shows them: NRI and the metrics endpoint."""

from __future__ import annotations

import time

from kata_pin.daemon.status.scrape import MetricsServer
from kata_pin.model.reports.daemon import Metrics, Nri
from kata_pin.sources.nri import NriPlugin


def nri_report(plugin: NriPlugin | None) -> Nri | None:
    """Return the plugin's connection; None if NRI is disabled."""
    if plugin is None:
        return None
    since = plugin.connected_at
    return Nri(
        socket=plugin.socket_path,
        runtime="" if since is None else plugin.runtime,
        connected_s=None if since is None else round(time.monotonic() - since, 3),
        problem=plugin.problem,
    )


def metrics_report(server: MetricsServer | None) -> Metrics | None:
    """Return where metrics are served; None if they are disabled."""
    return None if server is None else Metrics(server.address, server.problem)
