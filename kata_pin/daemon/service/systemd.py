"""sd_notify: reports to systemd that the service is ready, alive, reloading or stopping.

Protocol: sd_notify(3). Without NOTIFY_SOCKET (not under systemd) every call does nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.sandboxes import Sandboxes


class Notifier:
    """Sends datagrams to the service manager; never fails the caller."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID."""
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_seconds(environ)

    def send(self, *assignments: str) -> None:
        """Send variables, each as NAME=value."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(assignments).encode(), address)
        except OSError:
            return  # a manager that does not listen must not end the service


@dataclass
class ServiceStatus:
    """What systemd shows of the daemon: its state, and one line about its sandboxes."""

    _notifier: Notifier
    _sandboxes: Sandboxes
    _live: LiveConfig

    def ready(self) -> None:
        """Report that start-up, or a reload, is done."""
        self._notifier.send("READY=1", self._status)

    def reloading(self) -> None:
        """Report that a reload began; `ready` ends it (Type=notify-reload)."""
        self._notifier.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    async def run(self) -> None:
        """Report that start-up is done, then feed the watchdog while the event loop runs."""
        self.ready()
        period = self._notifier.watchdog_s
        while period is not None:
            await asyncio.sleep(period)
            self._notifier.send("WATCHDOG=1", self._status)

    @property
    def _status(self) -> str:
        return f"STATUS={len(self._sandboxes.ids)} sandboxes, mode {self._live.now.mode.value}"


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """Return half the watchdog's period, when it is meant for this process."""
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2_000_000 or None
