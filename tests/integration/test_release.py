"""`kata-pin release`: what each pod of the chart runs at its start before an uninstall."""

from __future__ import annotations

import os

import pytest

from tests.support.daemon import private_node
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs"),
]


def test_a_daemon_that_only_starts_releases_what_the_former_one_pinned() -> None:
    """The step runs beside a daemon that is not ready yet; afterwards that one pins nothing."""
    everywhere = os.sched_getaffinity(0)
    with private_node() as node:
        former = node.start()
        with node.pod("p1") as pod:
            pod.announce()
            pod.create("c1", "1", exclusive=True)
            node.wait_state("p1", "ok")
            assert pod.misplaced(everywhere)
            former.terminate()
            assert pod.misplaced(everywhere), "SIGTERM undid something"
            daemon = node.start(ready=False)
            done = node.cli("release", "--wait", "60s")
            assert done.returncode == 0, done.stderr
            assert "restored all affinities (by the daemon)" in done.stdout
            wait_for(lambda: not pod.misplaced(everywhere), "the original affinities")
            daemon.wait_ready()
            pod.create("c2", "0")
            node.ask("reconcile")
            assert not pod.misplaced(everywhere)


def test_without_a_daemon() -> None:
    """It fails after its wait, and names the command for that."""
    with private_node() as node:
        done = node.cli("release", "--wait", "1s")
        assert done.returncode == 1
        assert "kata-pin unpin" in done.stderr
