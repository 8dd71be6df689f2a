"""vCPUs that come and go, threads born under a narrow mask, and a QEMU whose shim has died."""

from __future__ import annotations

import os

import pytest

from tests.e2e.katapods import LabPod, Pods
from tests.support.daemon import Node as PrivateNode
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("kvm", "untouched")


def _paired(pod: LabPod) -> dict[int, set[int]]:
    """Return where each vCPU thread is, by QEMU's cpu-index."""
    return {index: os.sched_getaffinity(tid) for index, tid in pod.kata.vcpus().items()}


def test_vcpus_come_with_descending_indexes_and_go(pinner: PrivateNode, start_pod: Pods) -> None:
    """Plugged vCPUs take indexes 15, 14, 13; pairs move nobody who keeps one; unplug re-pairs.

    Births and exits alone tell: no audit and no hook runs.
    """
    pod = start_pod(cpus="4-7")
    pod.create("c1", "4,5", exclusive=True)
    pod.create("c2", "6,7")
    pod.wait_placed({6, 7}, {0: 4, 1: 5})
    assert pod.kata.shim.plug(3) == ["cpu-0", "cpu-1", "cpu-2"]
    assert sorted(pod.kata.vcpus()) == [0, 1, 13, 14, 15]
    pod.wait_placed({6, 7}, {15: 4, 1: 5})  # vCPU 0 serves the guest's own work
    assert pod.kata.shim.unplug(2) == ["cpu-2", "cpu-1"]
    assert sorted(pod.kata.vcpus()) == [0, 1, 15]
    pod.wait_placed({6, 7}, {15: 4, 1: 5})
    pod.kata.shim.unplug(1)
    pod.wait_placed({6, 7}, {0: 4, 1: 5})
    threads = pod.shown()
    assert {one["vcpu"] for one in threads.values() if one["role"] == "vcpu"} == {0, 1}
    assert set(pod.kata.tids()) <= set(threads)
    assert pinner.wait_state("p1", "ok")


def test_plugged_again_after_unplug(start_pod: Pods) -> None:
    """A vCPU plugged into a slot that was used before is named and paired like the first one."""
    pod = start_pod(cpus="4-7")
    pod.create("c1", "4,5,6", exclusive=True)
    pod.create("c2", "7")
    pod.kata.shim.plug(2)
    pod.wait_placed({7}, {1: 4, 14: 5, 15: 6})
    pod.kata.shim.unplug(2)
    wait_for(lambda: sorted(pod.kata.vcpus()) == [0, 1], "two vCPUs")
    pod.kata.shim.plug(2)
    wait_for(lambda: sorted(pod.kata.vcpus()) == [0, 1, 14, 15], "four vCPUs")
    cpus = {4, 5, 6}
    wait_for(
        lambda: {min(c) for i, c in _paired(pod).items() if i and len(c) == 1} == cpus,
        "each exclusive pCPU with one vCPU",
    )
    assert _paired(pod)[0] == {7}


def test_threads_are_born_on_the_narrow_mask_and_leave_it(
    pinner: PrivateNode, start_pod: Pods
) -> None:
    """With the main thread on one CPU every new thread starts there, and is moved by its birth."""
    pod = start_pod(cpus="4-7")
    pod.create("c1", "4,5", exclusive=True)
    pod.create("c2", "7")
    pod.wait_placed({7}, {0: 4, 1: 5})
    assert pinner.daemon is not None
    with pinner.daemon.hung():
        pod.kata.shim.plug(1)
        assert _paired(pod)[15] == {7}
    pod.wait_placed({7}, {15: 4, 1: 5})
    assert pinner.wait_state("p1", "ok")


def test_orphan_is_shown_adopted_and_released(pinner: PrivateNode, start_pod: Pods) -> None:
    """A QEMU whose shim died stays pinned, is shown as an orphan, is adopted, and is released."""
    pod = start_pod(cpus="4-7", virtiofsd=True)
    pod.create("c1", "4,5", exclusive=True)
    pod.create("c2", "6,7")
    pod.wait_placed({6, 7}, {0: 4, 1: 5})
    vcpus = pod.kata.vcpus()
    first = {tid: os.sched_getaffinity(tid) for tid in (*pod.kata.tids(), *pod.helpers())}
    assert pinner.sandboxes()["p1"]["vmm"]["orphan"] is False
    pod.kata.orphan()
    pod.started("c2")
    wait_for(lambda: pinner.sandboxes()["p1"]["vmm"]["orphan"], "the orphan to be shown")
    assert _where(first) == first

    assert pinner.daemon is not None
    pinner.daemon.kill()
    for file in pinner.runtime_dir.glob("registry.db*"):
        file.unlink()
    for tid in first:
        os.sched_setaffinity(tid, {4, 5, 6, 7})
    pinner.start()  # it knows nothing: Kata's state and the processes tell all
    wait_for(lambda: _where(first) == first, "the adopted orphan's threads in place")
    shown = pinner.wait_state("p1", "ok")
    assert (shown["vmm"]["orphan"], shown["vmm"]["pid"]) == (True, pod.kata.pid)
    named = {one["tid"]: one["vcpu"] for one in shown["threads"] if one["role"] == "vcpu"}
    assert named == {tid: index for index, tid in vcpus.items()}
    assert {one["tid"] for one in shown["threads"] if one["role"] == "virtiofsd"}

    pinner.ask("unpin", sandbox=pod.id)
    released = _where(first)
    assert {frozenset(released[tid]) for tid in pod.kata.tids()} == {frozenset({4, 5, 6, 7})}
    # virtiofsd's cgroup allows all CPUs: the containers' union is not remembered as its own mask
    assert all(cpus >= {4, 5, 6, 7} for cpus in released.values())
    assert pinner.wait_state("p1", "released")
    pod.kata.stop()
    wait_for(lambda: "p1" not in pinner.sandboxes(), "the orphan's end to be noticed")


def _where(tids: dict[int, set[int]]) -> dict[int, set[int]]:
    return {tid: os.sched_getaffinity(tid) for tid in tids}
