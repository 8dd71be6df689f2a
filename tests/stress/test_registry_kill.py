"""The registry's file after kill -9 of its writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from kata_pin.records.containers import Registry

_WRITER = """
import sys
from kata_pin.records.containers import Registry
from kata_pin.base.sandbox import Container
one = Registry(sys.argv[1], boot_id="boot-1")
for n in range(1, 100000):
    container = Container(id=f"c{n}", sandbox_id="pod", recorded_ns=n, source="s")
    one.record(container, stamp_ns=n, pid=1)
    print(n, flush=True)
"""


def test_kill_loses_no_committed_record(tmp_path: Path) -> None:
    """Every record acknowledged before kill -9 is there afterwards, at 20 random moments."""
    path = str(tmp_path / "registry.db")
    for _ in range(20):
        for suffix in ("", "-wal", "-shm"):
            Path(path + suffix).unlink(missing_ok=True)
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, path], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            head = [writer.stdout.readline() for _ in range(os.urandom(1)[0] % 60 + 1)]
            writer.send_signal(signal.SIGKILL)
            acknowledged = [int(line) for line in head + writer.stdout.read().split()]
        again = Registry(path, boot_id="boot-1")
        ids = {c.id for c in again.containers("pod")}
        assert {f"c{n}" for n in acknowledged} <= ids
        again.close()
