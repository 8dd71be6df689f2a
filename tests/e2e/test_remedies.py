"""What the remedies rest on, with real units and cgroups: who is restricted, and what a VM's cgroup
allows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.cli.doctor.install import narrow_runtimes
from tests.e2e.criruntime import CriNode, kata_handler, qemu_pid
from tests.e2e.node import Node
from tests.e2e.nodepods import VmThreads
from tests.e2e.unit import Unit

pytestmark = [pytest.mark.usefixtures("kvm"), pytest.mark.timeout(1800)]

CPU: Final = 4
"""The pod's exclusive pCPUs: this one,"""
LATER: Final = 5
"""and this one."""


@pytest.fixture(scope="module")
def containerd(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CriNode]:
    """containerd with minikata as the handler `kata`."""
    with kata_handler(node, tmp_path_factory.mktemp("cri")) as made:
        yield made


@pytest.fixture
def pods(containerd: CriNode) -> Iterator[CriNode]:
    """Pods of one test; they live until a failure is diagnosed."""
    yield containerd
    containerd.remove_all()


@pytest.fixture
def every(node: Node) -> set[int]:
    """All pCPUs of the machine."""
    return set(range(node.cpus))


def test_a_restricted_runtime_is_found(node: Node, pods: CriNode, every: set[int]) -> None:
    """doctor's row of a containerd whose unit has AllowedCPUs=, and of one with CPUAffinity=."""
    pid = _main_pid(node, "containerd")
    narrow = CpuSet([0, 1])
    assert list(narrow_runtimes(CpuSet(every))) == []
    _allow(node, "containerd.service", str(narrow))
    try:
        node.wait(lambda: os.sched_getaffinity(pid) == set(narrow), "containerd to be restricted")
        texts = [row.text for row in narrow_runtimes(CpuSet(every))]
        said = f"containerd (pid {pid}) may run on {narrow} only"
        assert [text for text in texts if text.startswith(said)], texts
    finally:
        _allow(node, "containerd.service", "")
        pods.restart()
    assert list(narrow_runtimes(CpuSet(every))) == [], "as the remedy says: removed and restarted"
    drop_in = Path("/run/systemd/system/containerd.service.d/kp.conf")
    drop_in.parent.mkdir(parents=True, exist_ok=True)
    drop_in.write_text(f"[Service]\nCPUAffinity={narrow}\n")
    try:
        node.run(["systemctl", "daemon-reload"], seconds=60)
        pods.restart()
        assert {row.status for row in narrow_runtimes(CpuSet(every))} == {"warn"}
    finally:
        drop_in.unlink()
        node.run(["systemctl", "daemon-reload"], seconds=60)
        pods.restart()
    assert list(narrow_runtimes(CpuSet(every))) == []


def test_overhead_that_the_cgroup_allows(node: Node, pods: CriNode) -> None:
    """A VM that is confined to its exclusive pCPUs: reserve:1 keeps its own threads off the rest.

    That is what the remedy for a pod's own threads says; housekeeping cannot be reached there.
    """
    unit = Unit(node)
    pod = pods.run_pod("locked")
    pods.create(
        *(pod, "locked", "app"), cpuset_cpus=f"{CPU}-{LATER}", cpu_quota=200_000, cpu_period=100_000
    )
    threads = VmThreads(qemu_pid(pod))
    node.wait(lambda: not threads.misplaced({14: CPU, 15: LATER}, {CPU, LATER}), "pins")
    with unit.settings(overhead="housekeeping", housekeeping="0-1"):
        unit.ask("reconcile")
        assert not threads.misplaced({14: CPU, 15: LATER}, {CPU, LATER}), "its cgroup is in the way"
    with unit.settings(overhead="reserve:1"):
        unit.ask("reconcile")
        node.wait(lambda: _alone_on(threads, CPU), "one exclusive pCPU without other threads")


def _alone_on(threads: VmThreads, cpu: int) -> bool:
    """Whether vCPUs alone may run on a pCPU."""
    vcpus = set(threads.vcpus().values())
    there = {tid for tid, cpus in threads.affinities().items() if cpu in cpus}
    return bool(there) and there <= vcpus


def _allow(node: Node, unit: str, cpus: str) -> None:
    command = ["systemctl", "set-property", "--runtime", unit, f"AllowedCPUs={cpus}"]
    node.run(command, seconds=60)


def _main_pid(node: Node, unit: str) -> int:
    return int(node.run(["systemctl", "show", "-p", "MainPID", "--value", unit]))
