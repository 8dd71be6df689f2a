"""A VM that is only starting, by events alone: its virtiofsd is off others' CPUs too.

Kata starts virtiofsd as a child of the shim. From its fork until its exec it is a copy of the shim,
and on a busy node that takes long.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoint import checkpoint, replace
from tests.support.daemon import Node, Pod, private_node
from tests.support.katalike import VIRTIOFSD
from tests.support.shim_process import ProcessShim
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.skipif(not VIRTIOFSD.exists(), reason="needs virtiofsd of QEMU 7.2 or older"),
]


@pytest.fixture
def node() -> Iterator[Node]:
    """A node on which CPU 1 is another pod's."""
    with private_node() as one:
        replace(one.root / "cpu_manager_state", checkpoint("0", {"other": {"work": "1"}}))
        yield one


def _spawn_slowly(pod: Pod, until: Path) -> int:
    """Have the shim start virtiofsd, which becomes that program only when a file is there."""
    program = shlex.join(pod.kata.virtiofsd_argv())
    waiting = f"while [ ! -e {until} ]; do sleep 0.05; done; exec {program}"
    shim = pod.kata.shim
    assert isinstance(shim, ProcessShim)
    pod.kata.virtiofsd_pid = shim.spawn(["/bin/sh", "-c", waiting])
    return pod.kata.virtiofsd_pid


def _is_old(pid: int) -> bool:
    """Whether a process is too old to be looked at again without an event."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return age_s > 2.1


def _wait_moved(node: Node, pid: int) -> None:
    def moved() -> bool:
        return all(os.sched_getaffinity(int(tid)) == {0} for tid in os.listdir(f"/proc/{pid}/task"))

    try:
        wait_for(moved, "virtiofsd to be moved", 3.0)
    except TimeoutError as error:
        error.add_note(node.log[-4000:])
        raise


def test_a_file_server_that_comes_after_the_vmm(node: Node, tmp_path: Path) -> None:
    """The shim's child becomes virtiofsd when nothing else happens any more."""
    node.start()
    with node.pod("p1", booting=True) as pod:
        pod.wait_placed({0})
        pid = _spawn_slowly(pod, tmp_path / "go")
        wait_for(lambda: _is_old(pid), "the child to be old")
        (tmp_path / "go").touch()
        _wait_moved(node, pid)


def test_a_file_server_that_was_known_by_another_name(node: Node, tmp_path: Path) -> None:
    """Every process was looked at while it was the shim's copy; then it and the VMM start."""
    node.start()
    pod = node.pod("p1", booting=True)
    pod.kata.before_vmm = lambda: _before(node, pod, tmp_path / "go")
    with pod:
        pod.wait_placed({0})
        _wait_moved(node, pod.kata.virtiofsd_pid)


def _before(node: Node, pod: Pod, go: Path) -> None:
    pid = _spawn_slowly(pod, go)
    wait_for(lambda: _is_old(pid), "the child to be old")
    node.ask("reconcile")
    go.touch()
    wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "virtiofsd\n", "its exec")
