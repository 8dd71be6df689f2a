"""Reading the configuration again (SIGHUP, `kata-pin reload`).

A configuration that is wrong is reported, and the former one stays in force. It is reported until
one is accepted: in the state document, in the `config` document and as a metric.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kata_pin.config.tree import Config
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.service.audits import AuditLoop
from kata_pin.daemon.service.logging_setup import set_level
from kata_pin.daemon.service.systemd import ServiceStatus
from kata_pin.daemon.status.documents import utc
from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.errors import ConfigError
from kata_pin.model.reports.daemon import RefusedReload
from kata_pin.model.reports.history import NodeEventKind

BOUND: Final = (
    *(
        "runtime_dir",
        "user",
        "group",
        "paths",
        "hypervisors",
        "new_threads",
        "changes",
        "nri",
        "metrics",
    ),
    *("alloc", "resctrl"),
)
"""Settings and sections that the components are made of: changing them needs a restart."""


@dataclass
class Reload:
    """Puts another configuration in force.

    `reread` returns the configuration as it is now; raises ConfigError when it is wrong.
    """

    _live: LiveConfig
    _reread: Callable[[], Config]
    _sandboxes: Sandboxes
    _audits: AuditLoop
    _status: ServiceStatus
    _events: NodeEvents
    refused: RefusedReload | None = field(default=None, init=False)
    """The newest reload, if it was refused."""

    def __call__(self) -> str:
        """Return what is wrong with the configuration; empty when it is in force."""
        self._status.reloading()
        before = self._live.now
        try:
            fresh = self._reread()
            for key in BOUND:
                if getattr(fresh, key) != getattr(before, key):
                    raise ConfigError("cannot change while the daemon runs", key=key)
        except ConfigError as error:
            self.refused = RefusedReload(time=utc(time.time()), error=str(error))
            self._events.report(
                NodeEventKind.RELOAD_REFUSED,
                "configuration not reloaded: %s",
                error,
                level=logging.ERROR,
            )
            return str(error)
        else:
            if fresh.log_level is not before.log_level:
                set_level(fresh.log_level.value)
            self._live.replace(fresh)
            if fresh.audit != before.audit:
                self._audits.follow_periods()
            self._sandboxes.mark_all("configuration reloaded", event=True)
            self.refused = None
            self._events.report(
                NodeEventKind.RELOADED, "configuration reloaded", level=logging.INFO
            )
            return ""
        finally:
            self._status.ready()
