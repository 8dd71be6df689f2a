"""Asks QEMU: over Kata's extra monitor (`extra_monitor_socket`), which is free at any time (D6).

Only about threads that KVM and names left unnamed, once for each; those that QEMU does not list
then, its monitor's own thread among them, are neither vCPUs nor iothreads. The main socket is
Kata's, except during its first hook (hook_service.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from kata_pin.calls import Calls
from kata_pin.config.tree import Qmp
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.errors import QmpUnavailable
from kata_pin.model.thread import RoleSource
from kata_pin.vmm.qmp import query
from kata_pin.vmm.state_files import KataPaths
from kata_pin.wire.qemu.qmp import QmpAnswers

log = logging.getLogger(__name__)

_UNNAMED: Final = frozenset({RoleSource.ORDER, RoleSource.REST})


@dataclass
class ExtraMonitor:
    """Asks sandboxes' extra monitors; keeps nothing itself."""

    _paths: KataPaths
    _live: LiveConfig
    _calls: Calls

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
        if unnamed <= cache.asked or not exists(path, self._calls):
            return False
        cache.asked = unnamed
        answers = await ask_qemu(sandbox_id, path, cache.vmm.process.pid, settings, self._calls)
        if answers is not None:
            cache.qmp = answers
        return answers is not None


def exists(path: str, calls: Calls) -> bool:
    """Return whether there is a socket to ask."""
    try:
        calls.lstat(path)
    except OSError:
        return False
    return True


async def ask_qemu(
    sandbox_id: str, path: str, pid: int, settings: Qmp, calls: Calls
) -> QmpAnswers | None:
    """Return what QEMU answers over one of its monitors, or None; `pid` is QEMU's."""
    try:
        return await query(
            path,
            pid=pid,
            greeting_s=settings.greeting_ms / 1000,
            session_s=settings.session_ms / 1000,
            calls=calls,
        )
    except QmpUnavailable as error:
        log.info("sandbox %s: QMP not available: %s", sandbox_id, error)
        return None
