"""CPUs that come and go, isolated partitions, threaded cgroups, cgroup version 1."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import pytest

from tests.e2e.cgroup import Cpuset, cgroup
from tests.e2e.katapods import LabPod, Pods
from tests.e2e.node import Node
from tests.support.daemon import Node as PrivateNode
from tests.support.waiting import wait_for

OFTEN: Final = {"affinity_s": 1, "deep_s": 2}
PAIRS: Final = {0: 4, 1: 5}
REST: Final = {6, 7}

pytestmark = pytest.mark.usefixtures("kvm", "untouched")


@pytest.fixture
def pod(start_pod: Pods) -> LabPod:
    """A pod with exclusive CPUs 4 and 5 and shared CPUs 6 and 7, all set."""
    pod = start_pod(cpus="4-7", virtiofsd=True)
    pod.create("c1", "4,5", exclusive=True)
    pod.create("c2", "6,7")
    pod.wait_placed(REST, PAIRS)
    return pod


@pytest.fixture
def more_cgroups() -> Iterator[ExitStack]:
    """Cgroups of the test's own; gone before the pods are."""
    with ExitStack() as stack:
        yield stack


# ---- offline and online ------------------------------------------------------------------


def test_masks_shrink_with_a_cpu_and_come_back(
    node: Node,
    pinner: PrivateNode,
    pod: LabPod,
    configure: Callable[..., None],
    switch: Callable[[int, bool], None],
) -> None:
    """An exclusive and a shared CPU go offline: pairs and the rest shrink, the note says it.

    Online again they are used again; on version 1 Linux has cut the cpuset for good, until Kata
    writes it anew.
    """
    configure(audit=OFTEN)
    switch(5, False)
    switch(7, False)
    pod.wait_placed({6}, {1: 4})
    pinner.wait_state("p1", "ok")
    noted = {note["code"] for note in pinner.sandboxes()["p1"]["notes"]}
    assert "exclusive-offline" in noted
    assert pinner.ask("state")["node"]["online"] == "0-4,6,8-15"
    switch(5, True)
    switch(7, True)
    if node.cgroup == 1:
        assert pod.cgroup.effective() == "4,6"
        assert pod.overhead.effective() == "0-4,6,8-15"
        (pod.overhead.folder.parent / "cpuset.cpus").write_text("0-15")
        pod.overhead.write("0-15")
        pod.confine("4-7")
    pod.wait_placed(REST, {1: 4, 0: 5})
    assert "exclusive-offline" not in {n["code"] for n in pinner.wait_state("p1", "ok")["notes"]}


# ---- isolated partitions -----------------------------------------------------------------


@pytest.fixture
def partition(node: Node, more_cgroups: ExitStack) -> Cpuset:
    """Somebody else's isolated partition of CPUs 12 and 13."""
    if node.cgroup == 1:
        pytest.skip("partitions are cgroup version 2's")
    made = more_cgroups.enter_context(cgroup(node, "kata-pin-e2e-partition", "12-13"))
    _isolate(made)
    return made


def _isolate(group: Cpuset) -> None:
    file = group.folder / "cpuset.cpus.partition"
    file.write_text("isolated")
    assert file.read_text().strip() == "isolated"


def test_nothing_of_ours_enters_an_isolated_partition(
    pod: LabPod, configure: Callable[..., None], partition: Cpuset
) -> None:
    """Threads in other cgroups get what is left of their CPUs, else the next step; no EINVAL.

    virtiofsd has a cgroup without a cpuset, so it is the one that could go there.
    """
    del partition
    (tid, *_) = map(int, os.listdir(f"/proc/{pod.kata.virtiofsd_pid}/task"))
    with pytest.raises(OSError, match="Invalid argument") as refused:
        os.sched_setaffinity(tid, {12})
    assert refused.value.errno == errno.EINVAL
    configure(overhead="12,14")
    wait_for(lambda: os.sched_getaffinity(tid) == {14}, "virtiofsd on what is left")
    one = pod.shown()[tid]
    assert (one["desired"], one["expected"], one["fallback"]) == ("12,14", "14", "")
    configure(overhead="12,13")
    wait_for(lambda: os.sched_getaffinity(tid) == REST, "virtiofsd on the shared CPUs")
    one = pod.shown()[tid]
    assert (one["desired"], one["expected"], one["fallback"]) == ("12-13", "6-7", "shared")
    assert "allows only 0-11,14-15" in one["reason"]


def test_a_sandbox_in_an_isolated_partition_gets_one_cpu_a_thread(
    node: Node, pinner: PrivateNode, pod: LabPod, configure: Callable[..., None]
) -> None:
    """Nothing balances in the sandbox's own isolated partition: no thread has two CPUs there."""
    if node.kernel == "6.1":
        pytest.skip("Linux 6.1 does not list the CPUs of isolated partitions")
    configure(audit=OFTEN)
    _isolate(pod.cgroup)
    inside = pod.kata.tids()
    wait_for(lambda: {len(os.sched_getaffinity(tid)) for tid in inside} == {1}, "one CPU a thread")
    where = {tid: os.sched_getaffinity(tid) for tid in inside}
    vcpus = {index: where[tid] for index, tid in pod.kata.vcpus().items()}
    assert vcpus == {0: {4}, 1: {5}}
    others = [cpus for tid, cpus in where.items() if tid not in pod.kata.vcpus().values()]
    assert {cpu for cpus in others for cpu in cpus} == REST
    assert pinner.wait_state("p1", "ok")


# ---- threaded cgroups --------------------------------------------------------------------


def test_vcpus_in_a_threaded_cgroup(
    node: Node,
    pinner: PrivateNode,
    pod: LabPod,
    configure: Callable[..., None],
    more_cgroups: ExitStack,
) -> None:
    """Each thread is judged by its own cgroup: vCPUs in a threaded one that allows less."""
    if node.cgroup == 1:
        pytest.skip("threaded cgroups are version 2's")
    configure(audit=OFTEN)
    inner = more_cgroups.enter_context(_threaded(node, pod, "vcpus", "4-5"))
    for tid in pod.kata.vcpus().values():
        inner.add_thread(tid)
    pod.wait_placed(REST, PAIRS)
    wait_for(lambda: _cgroups(pod) == {f"/kata_{pod.id}/vcpus"}, "the vCPUs' cgroup to be shown")
    inner.write("5")
    first = pod.kata.vcpus()[0]
    wait_for(lambda: pod.shown()[first]["fallback"] == "cpuset", "the step of vCPU 0")
    one = pod.shown()[first]
    assert (one["desired"], one["expected"]) == ("4", "5")
    assert f"cgroup /kata_{pod.id}/vcpus allows only 5" in one["reason"]
    inner.write("4-5")
    pod.wait_placed(REST, PAIRS)
    assert pinner.wait_state("p1", "ok")


@contextlib.contextmanager
def _threaded(node: Node, pod: LabPod, name: str, cpus: str) -> Iterator[Cpuset]:
    """Make a threaded cgroup below the sandbox's; at the end its threads go back to that."""
    (pod.cgroup.folder / "cgroup.subtree_control").write_text("+cpuset")
    folder = pod.cgroup.folder / name
    folder.mkdir()
    (folder / "cgroup.type").write_text("threaded")
    inner = Cpuset(folder, node.cgroup)
    inner.write(cpus)
    try:
        yield inner
    finally:
        for tid in (folder / "cgroup.threads").read_text().split():
            pod.cgroup.add_thread(int(tid))
        folder.rmdir()


def _cgroups(pod: LabPod) -> set[str]:
    return {one["cgroup"] for one in pod.shown().values() if one["role"] == "vcpu"}


# ---- version 1 ---------------------------------------------------------------------------


def test_version_1_confines_vcpu_threads_only(
    node: Node, pinner: PrivateNode, pod: LabPod, configure: Callable[..., None]
) -> None:
    """Kata on version 1 moves vCPU threads alone: the others reach the node's CPUs, they do not."""
    if node.cgroup == 2:
        pytest.skip(f"{node.flavour} has cgroup version 2")
    threads = pod.shown()
    vcpus = set(pod.kata.vcpus().values())
    assert {threads[tid]["cpuset"] for tid in vcpus} == {"4-7"}
    assert {threads[tid]["cpuset"] for tid in set(pod.kata.tids()) - vcpus} == {"0-15"}
    configure(overhead="0,1")
    pod.wait_placed({0, 1}, PAIRS)
    pod.kata.shim.plug(1)
    (late,) = set(pod.kata.vcpus().values()) - vcpus  # not yet in the cgroup
    pod.confine("4-7")
    wait_for(lambda: os.sched_getaffinity(late) == {4}, "the plugged vCPU paired")
    assert pinner.wait_state("p1", "ok")
