"""`show --memory` beside a VMM whose memory map is locked."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kata_pin.base.documents.measured import MemoryDocument
from kata_pin.service.protocol import decode
from tests.support.locked_memory import locked_process
from tests.unit.cli import documents as docs
from tests.unit.conftest import Sockets

pytestmark = pytest.mark.root

PROGRAM = (
    "import sys; from kata_pin.cli import main\n"
    "from kata_pin.options.memory import report as memory\n"
    "memory.MAPS_S = 0.5\n"
    "sys.exit(main.run(sys.argv[1:]))"
)


def test_a_locked_memory_map_costs_the_deadline_only(tmp_path: Path) -> None:
    """numa_maps never answers: the command says so, and ends."""
    folder = tmp_path / "mount"
    folder.mkdir()
    with locked_process(folder) as process:
        vcpu = docs.thread(process.pid, "vcpu", "0", vcpu=0, tgid=process.pid)
        state = docs.state(docs.sandbox("shop/web", "0", vcpu, vmm=docs.vmm(pid=process.pid)))
        sockets = Sockets(tmp_path, {"state": lambda _: state})
        config = tmp_path / "config.yaml"
        config.write_text(f"version: 1\nruntime_dir: {tmp_path}\n")
        command = [sys.executable, "-c", PROGRAM, "--config", str(config)]
        start = time.monotonic()
        done = subprocess.run(
            [*command, "show", "web", "--memory", "--json"],
            capture_output=True,
            check=True,
            timeout=30,
        )
        spent = time.monotonic() - start
        sockets.close()
    (found,) = decode(done.stdout, MemoryDocument).sandboxes
    assert "was not read within 0.5 s" in found.problem
    assert spent < 20
