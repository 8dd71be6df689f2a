"""Asks QEMU over Kata's extra monitor (`extra_monitor_socket`), which is free at any time (D6).

Only about threads that KVM and names left unnamed, once for each. The main socket is Kata's, except
during its first hook (hook_service.py).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.errors import QmpUnavailable
from kata_pin.model.thread import RoleSource
from kata_pin.vmm.qmp import query
from kata_pin.vmm.state_files import KataPaths

log = logging.getLogger(__name__)

_UNNAMED: Final = frozenset({RoleSource.ORDER, RoleSource.REST})


@dataclass
class ExtraMonitor:
    """Asks sandboxes' extra monitors; keeps nothing itself."""

    _paths: KataPaths
    _live: LiveConfig

    async def ask(self, sandbox_id: str, cache: SandboxCache) -> bool:
        """Ask about threads that no pass has named yet; return whether QEMU answered."""
        path, settings = self._paths.extra_monitor(sandbox_id), self._live.now.qmp
        if cache.vmm is None or cache.report is None or not settings.enabled:
            return False
        unnamed = frozenset(
            thread.key
            for thread in cache.report.threads
            if thread.key.tgid == cache.vmm.process.pid and thread.role.source in _UNNAMED
        )
        if unnamed <= cache.asked or not os.path.exists(path):
            return False
        cache.asked = unnamed
        try:
            cache.qmp = await query(
                path,
                pid=cache.vmm.process.pid,
                greeting_s=settings.greeting_ms / 1000,
                session_s=settings.session_ms / 1000,
            )
        except QmpUnavailable as error:
            log.info("sandbox %s: extra monitor not available: %s", sandbox_id, error)
            return False
        return True
