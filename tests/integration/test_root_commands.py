"""What root runs does not trust the runtime directory, which is the daemon's user's."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kata_pin.base.counters import Scheduling
from kata_pin.base.threads import ThreadKey
from kata_pin.options.realtime import RtThreads
from kata_pin.records.containers import Registry
from kata_pin.records.hooks import Spool
from kata_pin.service.configuration import load
from kata_pin.service.offline import release_all
from kata_pin.service.runtime_dir import boot_id
from tests.support.daemon import Node, private_node
from tests.support.hooks import run_hook

pytestmark = [pytest.mark.qemu, pytest.mark.root]

NOBODY = 65534


@pytest.fixture
def node() -> Iterator[Node]:
    with private_node() as one:
        one.start().terminate()
        yield one


def test_a_row_makes_root_change_no_foreign_process(node: Node) -> None:
    """The registry says that a real-time process of others was an ordinary thread of a VMM's."""
    script = "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, text=True
    ) as process:
        while os.sched_getscheduler(process.pid) != os.SCHED_FIFO:
            time.sleep(0.01)
        stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        path = str(node.runtime_dir / "registry.db")
        with contextlib.closing(Registry(path, boot_id=boot_id())) as registry:
            key = ThreadKey(process.pid, process.pid, int(stat[19]))
            RtThreads(registry).keep("a", key, Scheduling(os.SCHED_OTHER, 0, key.starttime))
        release_all(load(str(node.config)))
        assert os.sched_getscheduler(process.pid) == os.SCHED_FIFO
        process.communicate("\n")


@pytest.mark.parametrize("name", ["registry.db", "registry.db-wal", "spool"])
def test_links_lead_root_nowhere(node: Node, name: str) -> None:
    """Commands of root and root's hook make nothing outside of the directory."""
    victim = node.root / "victim"
    if name == "spool":
        victim.mkdir()
        shutil.rmtree(node.runtime_dir / name)
    (node.runtime_dir / name).unlink(missing_ok=True)
    (node.runtime_dir / name).symlink_to(victim)
    assert node.cli("pin").returncode == 0
    Spool(str(node.runtime_dir / "spool")).retire()
    run_hook(node.runtime_dir, "poststop", state=b"{}")
    assert victim.is_dir() == (name == "spool")
    assert not victim.exists() or not list(victim.iterdir())


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_root_makes_the_registry_as_its_owner(node: Node) -> None:
    """So that no link which appears meanwhile leads to files of others."""
    (node.runtime_dir / "registry.db").unlink()
    trace = node.root / "trace"
    program = str(Path(sys.executable).with_name("kata-pin"))
    subprocess.run(
        [
            *("strace", "-f", "-e", "trace=openat,setresuid", "-o", str(trace)),
            *(program, "--config", str(node.config), "pin"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    lines = trace.read_text().splitlines()
    users = [line for line in lines if "setresuid" in line or "registry.db" in line]
    made = next(number for number, line in enumerate(users) if "O_CREAT" in line)
    last = [line for line in users[:made] if "setresuid" in line][-1]
    assert f"setresuid(-1, {NOBODY}, -1)" in last


def test_a_spool_of_many_names_costs_a_hook_little() -> None:
    """Of 400,000 names it reads as many as it would have left, and leaves no message."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        spool = Path(folder, "spool")
        spool.mkdir()
        (spool / "first").touch()
        for number in range(400_000):
            os.link(spool / "first", spool / f"{number}-1.msg")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = run_hook(Path(folder), "poststop", state=b"{}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert "messages are waiting" in run.stderr
        assert used_s < 0.15
