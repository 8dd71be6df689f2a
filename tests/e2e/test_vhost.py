"""vhost workers in the form that the kernel gives them, pinned wherever their cgroup lets them go.

Linux 6.4 and later: threads of QEMU, in its cgroup, born with the main thread's affinity. Before:
kernel threads of their own that stay in the cgroup of QEMU's creator, born on all of its CPUs.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from tests.e2e.katapods import LabPod, Pods
from tests.e2e.node import Node
from tests.support.daemon import Node as PrivateNode
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("kvm", "untouched")


def _pinned(start_pod: Pods, *, cgroup_only: bool = False) -> LabPod:
    """Start a pod with exclusive CPUs 4 and 5 and shared CPUs 6 and 7, all set."""
    pod = start_pod(cpus="4-7", cgroup_only=cgroup_only)
    pod.create("c1", "4,5", exclusive=True)
    pod.create("c2", "6,7")
    return pod


def test_workers_are_shown_in_their_form_and_pinned(node: Node, start_pod: Pods) -> None:
    """All three workers have the role, the process that the kernel gives them, and the right CPUs.

    On 6.1 they are in another cgroup than QEMU, without a cpuset, and are pinned all the same.
    """
    pod = _pinned(start_pod)
    pod.wait_placed({6, 7}, {0: 4, 1: 5})
    threads = pod.shown()
    workers = {tid: one for tid, one in threads.items() if one["role"] == "vhost"}
    assert set(workers) == set(pod.workers)
    inside = node.kernel == "6.12"
    assert {one["tgid"] == pod.kata.pid for one in workers.values()} == {inside}
    cgroup = "kata" if inside else "kata_overhead"
    assert {one["cgroup"].split("/")[1].split("_kp")[0] for one in workers.values()} == {cgroup}


def test_moved_workers_are_put_back(start_pod: Pods, configure: Callable[..., None]) -> None:
    """Workers that somebody moved are drift like any other thread: the audit puts them back."""
    configure(audit={"affinity_s": 1, "deep_s": 3600})
    pod = _pinned(start_pod)
    pod.wait_placed({6, 7}, {0: 4, 1: 5})
    for tid in pod.workers:
        os.sched_setaffinity(tid, {4})
    pod.wait_placed({6, 7}, {0: 4, 1: 5})


def test_late_worker_is_pinned_by_its_birth(start_pod: Pods) -> None:
    """A vhost device plugged into the running VM brings a worker: an event tells, no audit runs."""
    pod = _pinned(start_pod)
    pod.wait_placed({6, 7}, {0: 4, 1: 5})
    before = set(pod.workers)
    pod.kata.shim.execute(
        "device_add", **{"driver": "vhost-vsock-pci", "bus": "late", "guest-cid": 4711}
    )
    (late,) = wait_for(lambda: set(pod.look_for_workers()) - before, "a worker more")
    pod.wait_placed({6, 7}, {0: 4, 1: 5})
    wait_for(
        lambda: pod.shown().get(late, {}).get("role") == "vhost", "the late worker to be shown"
    )


def test_worker_outside_its_cpuset_is_shown_with_the_step(
    pinner: PrivateNode, start_pod: Pods, configure: Callable[..., None]
) -> None:
    """All of it in one cpuset (sandbox_cgroup_only): the kernel answers EINVAL, the report why."""
    configure(overhead="0,1")
    pod = _pinned(start_pod, cgroup_only=True)
    for tid in pod.workers:
        with pytest.raises(OSError, match="Invalid argument") as refused:
            os.sched_setaffinity(tid, {0, 1})
        assert refused.value.errno == errno.EINVAL
    pod.wait_placed({6, 7}, {0: 4, 1: 5})
    threads = pod.shown()
    for tid in pod.workers:
        one = threads[tid]
        assert (one["desired"], one["expected"], one["fallback"]) == ("0-1", "6-7", "shared")
        assert f"cgroup /kata_{pod.id} allows only 4-7" in one["reason"]
    notes = {note["code"] for note in pinner.sandboxes()["p1"]["notes"]}
    assert "fallback" in notes


def test_worker_in_the_overhead_cgroup_goes_where_qemu_cannot(
    node: Node, start_pod: Pods, configure: Callable[..., None]
) -> None:
    """Outside the sandbox's cgroup a 6.1 worker reaches the node's CPUs; QEMU's own threads not."""
    configure(overhead="0,1")
    pod = _pinned(start_pod)
    reach = {6, 7} if node.kernel == "6.12" else {0, 1}

    def placed() -> bool:
        there = {frozenset(os.sched_getaffinity(tid)) for tid in pod.workers}
        return there == {frozenset(reach)}

    wait_for(placed, f"workers on {reach}")
    threads = pod.shown()
    steps = {threads[tid]["fallback"] for tid in pod.workers}
    assert steps == ({"shared"} if node.kernel == "6.12" else {""})
    # On version 1 only vCPU threads are confined; on version 2 all of QEMU is.
    assert threads[pod.kata.pid]["fallback"] == ("shared" if node.cgroup == 2 else "")
