"""CPUs that come and go, and cpusets that somebody writes, followed by the kernel's events alone.

The daemon of these tests audits once an hour, and no test asks it to look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from tests.e2e.katapods import LabPod, Pods
from tests.e2e.node import Node
from tests.support.daemon import QUIET
from tests.support.daemon import Node as PrivateNode
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("kvm", "untouched")

PAIRS: Final = {0: 4, 1: 5}
REST: Final = {6, 7}


@pytest.fixture
def pod(start_pod: Pods, pinner: PrivateNode) -> LabPod:
    """A pod with exclusive CPUs 4 and 5 and shared CPUs 6 and 7, all set."""
    assert pinner.settings["audit"] == QUIET
    pod = start_pod(cpus="4-7", virtiofsd=True)
    pod.create("c1", "4,5", exclusive=True)
    pod.create("c2", "6,7")
    pod.wait_placed(REST, PAIRS)
    return pod


def test_cpus_go_offline_and_online(
    node: Node, pinner: PrivateNode, pod: LabPod, switch: Callable[[int, bool], None]
) -> None:
    """The uevent is enough: pairs and the rest shrink with their CPUs, and use them again.

    Version 1 cuts cpusets for good, so that more is needed there: see test_cpus.py.
    """
    if node.cgroup == 1:
        pytest.skip("Linux cuts cpusets of version 1 for good")
    switch(5, False)
    pod.wait_placed(REST, {1: 4})
    switch(7, False)
    pod.wait_placed({6}, {1: 4})
    assert pinner.ask("state")["node"]["online"] == "0-4,6,8-15"
    switch(7, True)
    pod.wait_placed(REST, {1: 4})
    switch(5, True)
    pod.wait_placed(REST, {1: 4, 0: 5})


def test_a_cpuset_that_somebody_writes(pod: LabPod) -> None:
    """A pass follows each write of the sandbox's cgroup, and all is as before in the end.

    Linux 6.12 moves most threads by itself: that a pass looked is what the daemon shows.
    """
    for cpus in ("4-6", "6-7", "4-7"):
        _write(pod, cpus)
    pod.wait_placed(REST, PAIRS)


def _write(pod: LabPod, cpus: str) -> None:
    pod.cgroup.write(cpus)
    wait_for(lambda: _seen(pod) == {cpus}, f"the cpuset {cpus} to be seen")


def _seen(pod: LabPod) -> set[str]:
    """Return the cpusets that the last pass saw around vCPU threads."""
    return {one["cpuset"] for one in pod.shown().values() if one["role"] == "vcpu"}
