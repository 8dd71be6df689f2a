"""The daemon's own connections, as the state document tells of them: NRI, and who may scrape.

Pure, nothing is kept.
"""

from __future__ import annotations

import time

from kata_pin.daemon.status.documents import Json
from kata_pin.daemon.status.scrape import MetricsServer
from kata_pin.sources.nri import NriPlugin


def nri_document(plugin: NriPlugin | None) -> Json | None:
    """Return how the plugin stands; None where it is switched off."""
    if plugin is None:
        return None
    since = plugin.connected_at
    return {
        "socket": plugin.path,
        "runtime": "" if since is None else plugin.runtime,
        "connected_s": None if since is None else round(time.monotonic() - since, 3),
        "problem": plugin.problem,
    }


def metrics_document(server: MetricsServer | None) -> Json | None:
    """Return where metrics are served; None where they are switched off."""
    return None if server is None else {"address": server.address, "problem": server.problem}
