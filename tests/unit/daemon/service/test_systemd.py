"""What the service manager is told, as sd_notify(3) says."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kata_pin.daemon.service.systemd import Notifier


@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
def test_messages_arrive_as_datagrams(tmp_path: Path, abstract: bool) -> None:
    """Ready, status, reload, watchdog and stop reach both kinds of socket."""
    name = f"@kata-pin-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": name})
        notifier.ready("3 sandboxes")
        assert manager.recv(4096) == b"READY=1\nSTATUS=3 sandboxes"
        notifier.reloading()
        told = dict(line.split(b"=") for line in manager.recv(4096).splitlines())
        assert told[b"RELOADING"] == b"1"
        assert int(told[b"MONOTONIC_USEC"]) > 0
        notifier.alive()
        notifier.status("4 sandboxes")
        notifier.stopping()
        rest = [manager.recv(4096) for _ in range(3)]
        assert rest == [b"WATCHDOG=1", b"STATUS=4 sandboxes", b"STOPPING=1"]


def test_without_a_manager_nothing_happens(tmp_path: Path) -> None:
    """No socket in the environment, or none that listens, is no failure."""
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "absent")}):
        Notifier(environ).ready("")


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_period(environ: dict[str, str], seconds: float | None) -> None:
    """Half of what systemd gives, when it is meant for this process."""
    assert Notifier(environ).watchdog_s == seconds
