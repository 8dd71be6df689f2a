"""sd_notify: telling systemd that the service is ready, alive, reloading or stopping.

Protocol: sd_notify(3). Without NOTIFY_SOCKET (not under systemd) every call does nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Sends datagrams to the service manager; never fails the caller."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Take the environment; reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID."""
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_seconds(environ)

    def ready(self, status: str) -> None:
        """Say that start-up is done."""
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        """Replace the one-line status that `systemctl status` shows."""
        self._send(f"STATUS={status}")

    def alive(self) -> None:
        """Feed the watchdog."""
        self._send("WATCHDOG=1")

    def reloading(self) -> None:
        """Say that a reload began; `ready` ends it (Type=notify-reload)."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Say that the service is ending."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(message.encode(), address)
        except OSError:
            return  # a manager that does not listen must not end the service


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """Return half the watchdog's period, when it is meant for this process."""
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2_000_000 or None
