"""Processes that anybody can run cost the sandboxes of others nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Node, private_node
from tests.support.locked_memory import locked_process
from tests.support.qemu import QEMU, Machine
from tests.support.vmmhost import PYTHON
from tests.support.waiting import SCALE, wait_for

pytestmark = [pytest.mark.alone, pytest.mark.qemu, pytest.mark.root]

SMALL = Machine(boot=1, maximum=1)
AS_SOMEBODY = ("setpriv", "--reuid=4242", "--regid=4242", "--clear-groups")
STRANGERS = 30
"""Processes with long command lines; scripts/chaos has 300."""


@pytest.fixture
def node() -> Iterator[Node]:
    with private_node(audit={"affinity_s": 0.2, "deep_s": 0.2}, hypervisors=[QEMU, PYTHON]) as one:
        yield one


def _hooks_in_budget(node: Node, number: int) -> None:
    """Run hooks of a healthy pod, and ask the daemon, while strangers are about."""
    with node.pod("p1", machine=SMALL) as pod:
        pod.announce()
        for count in range(number):
            run = pod.create(f"c{count}", "1")
            assert run.stderr == ""
            asked = time.monotonic()
            node.ask("ping")
            assert time.monotonic() - asked < 0.5 * SCALE
            pod.stop(f"c{count}")
        assert node.spooled() == []


def test_long_command_lines(node: Node) -> None:
    """82 KiB of -numa in each of many processes of another user: nothing is late or spooled."""
    name = node.id_of("victim")
    argv = [
        *AS_SOMEBODY,
        "sh",
        "-c",
        f'exec -a {QEMU} {PYTHON} -c "import time; time.sleep(99)" "$@"',
    ]
    line = ["-name", f"sandbox-{name}", "-smp", "4096", *["-numa", "cpu"] * 8180]
    with contextlib.ExitStack() as stack:
        for _ in range(STRANGERS):
            process = subprocess.Popen([*argv, "bash", *line])
            stack.callback(process.wait)
            stack.callback(process.kill)
        node.start()
        _hooks_in_budget(node, 10)
        assert "victim" not in node.sandboxes()


def test_locked_memory(node: Node, tmp_path: Path) -> None:
    """A VMM whose command line cannot be read is named; the daemon and other pods go on."""
    name = node.id_of("p2")
    annotations = {"io.kubernetes.cri.container-type": "sandbox"}
    node.bundle(name, {"annotations": annotations, "linux": {"resources": {"cpu": {"cpus": "1"}}}})
    with locked_process(tmp_path / "m", "-name", f"sandbox-{name}") as stuck:
        node.start()
        before = os.sched_getaffinity(stuck.pid)
        run = node.hook("createRuntime", name, stuck.pid, "--record-ms=1000", "--pin-ms=1000")
        assert "the process's memory is locked" in run.stderr
        _hooks_in_budget(node, 5)
        shown = node.ask("state")
        assert f"pid {stuck.pid}" in next(
            note["text"] for note in shown["notes"] if note["code"] == "memory-locked"
        )
        assert "memory is locked" in node.sandboxes()["p2"]["vmm_problem"]
        assert f"pid {stuck.pid}" in node.cli("doctor").stdout
        assert node.daemon is not None
        node.daemon.kill()
        node.start()
        _hooks_in_budget(node, 2)
        assert "p2" in node.sandboxes()
        assert os.sched_getaffinity(stuck.pid) == before
        assert node.log.count(f"process {stuck.pid} (") == 2  # once per daemon
    wait_for(lambda: not node.ask("state")["notes"], "the note to go")
