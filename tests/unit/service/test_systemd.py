"""What the service manager is told, as sd_notify(3) says."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.service.process import Notifier, ServiceStatus


@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
async def test_messages_arrive_as_datagrams(tmp_path: Path, abstract: bool) -> None:
    """Ready, status, reload and watchdog reach both kinds of socket."""
    name = f"@kata-pin-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": name})
        sandboxes = Sandboxes()
        status = ServiceStatus(notifier, sandboxes, LiveConfig(Config()))
        status.ready()
        assert manager.recv(4096) == b"READY=1\nSTATUS=0 sandboxes, mode act"
        status.reloading()
        told = dict(line.split(b"=") for line in manager.recv(4096).splitlines())
        assert told[b"RELOADING"] == b"1"
        assert int(told[b"MONOTONIC_USEC"]) > 0
        sandboxes.enter("s")
        notifier.watchdog_s = 0.001
        alive = asyncio.create_task(status.run())
        messages = [await asyncio.to_thread(manager.recv, 4096) for _ in range(2)]
        alive.cancel()
        line = b"STATUS=1 sandboxes, mode act"
        assert messages == [b"READY=1\n" + line, b"WATCHDOG=1\n" + line]


def test_without_a_manager_nothing_is_raised(tmp_path: Path) -> None:
    """No socket in the environment, or none that listens, is no failure."""
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "absent")}):
        Notifier(environ).send("READY=1")


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
