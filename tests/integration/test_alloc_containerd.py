"""Our own allocator under the real containerd 1.7: what NRI answers, cgroups and threads agree.

The node has two CPUs here, so an exclusive one leaves one for everybody else. runc's containers are
judged by their cgroup's cpuset, Kata's by the affinity of QEMU's threads and by the cpuset of the
sandbox's cgroup, which minikata writes as Kata does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import grpc
import pytest

from tests.support.allotcluster import (
    ALLOC,
    KEY,
    ONE_CPU,
    Allotted,
    agreed,
    kill_and_start,
    killed_within,
    run,
)
from tests.support.containerd import private_containerd, why_not
from tests.support.daemon import private_node
from tests.support.rival import rival
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.oci,
    pytest.mark.skipif(why_not() != "", reason=why_not()),
    pytest.mark.skipif(os.cpu_count() != 2, reason="the tests know a node of two CPUs"),
]


@pytest.fixture
def cluster(folder: Path) -> Iterator[Allotted]:
    with private_node() as node, private_containerd(folder, node.dirs) as containerd:
        alloc = ALLOC | {"orders": str(node.root / "policies"), "push": "no"}
        yield Allotted(node, containerd, alloc=alloc)


def test_exclusive_cpus_come_and_go(cluster: Allotted) -> None:
    """A Kata pod's exclusive CPU leaves all other cpusets in the same answer, and comes back."""
    cluster.start()
    _, plain = run(cluster, "r0")
    assert cluster.cgroup(plain) == "0-1"
    pod, app = run(cluster, "k1", "exclusive", handler="kata", **ONE_CPU)
    own = cluster.grant(app)["exclusive"]
    (other,) = {"0", "1"} - {own}
    assert cluster.cgroup(plain) == other
    cluster.wait_exclusive(pod, own)
    assert cluster.sandbox_cgroup(pod) == own
    assert own in cluster.vcpus(pod).values()
    assert cluster.allocation()["guarantee"] == "every container of the node"
    cluster.cri.stop(app)
    cluster.wait_exclusive(pod, "")
    assert cluster.cgroup(plain) == other
    cluster.cri.stop_pod(pod)
    wait_for(lambda: cluster.allocation()["pools"]["shared"] == "0-1", "the pod's CPU to be free")
    run(cluster, "r1")
    assert cluster.cgroup(plain) == "0-1"


@pytest.mark.parametrize("handler", ["", "kata"])
def test_a_failing_start_takes_no_more_cpus(cluster: Allotted, handler: str) -> None:
    """Each try of a command that does not exist has the same CPU, and so has one that works.

    containerd reports no end of any of them. The pod's end releases the CPU.
    """
    cluster.start()
    _, plain = run(cluster, "r0")
    pod = cluster.cri.run_pod("k1", handler, {KEY: "exclusive"})
    held = set()
    for attempt in range(4):
        app = cluster.cri.create(
            pod, "app", pod_name="k1", attempt=attempt, command=["/does-not-exist"], **ONE_CPU
        )
        with pytest.raises(grpc.RpcError):
            cluster.cri.start(app)
        held.add(cluster.grant(app)["exclusive"])
        assert cluster.allocation()["pools"]["exclusive"] in held
    (own,) = held
    assert own
    app = cluster.cri.create(pod, "app", pod_name="k1", attempt=4, **ONE_CPU)
    cluster.cri.start(app)
    assert cluster.grant(app)["exclusive"] == own
    assert {cluster.cgroup(plain), own} == {"0", "1"}
    cluster.cri.stop_pod(pod)
    wait_for(lambda: cluster.allocation()["pools"]["shared"] == "0-1", "the pod's CPU to be free")


def test_a_failed_start_counts_no_more(cluster: Allotted) -> None:
    """NRI reports it to nobody; with `alloc.cri` the audit finds it exited and says so."""
    settings = cluster.node.settings
    settings["audit"] = {"affinity_s": 0.5, "deep_s": 0.5}
    settings["alloc"] |= {"cri": str(cluster.containerd.cri_socket)}
    cluster.node.config.write_text(json.dumps(settings))
    cluster.start()
    pod = cluster.cri.run_pod("k1", "kata", {KEY: "exclusive"})
    app = cluster.cri.create(pod, "app", pod_name="k1", command=["/does-not-exist"], **ONE_CPU)
    assert cluster.node.registered()[app].counts
    with pytest.raises(grpc.RpcError):
        cluster.cri.start(app)
    wait_for(lambda: not cluster.node.registered()[app].counts, "the audit to find it")
    wait_for(lambda: cluster.grant(app)["ended"], "its CPU to wait for the next try")
    again = cluster.cri.create(pod, "app", pod_name="k1", attempt=1, **ONE_CPU)
    cluster.cri.start(again)
    cluster.wait_exclusive(pod, cluster.grant(again)["exclusive"])


@pytest.mark.parametrize("handler", ["", "kata"])
def test_a_restarting_container_keeps_its_cpu(cluster: Allotted, handler: str) -> None:
    """Between two instances it is nobody else's, not even over a restart of the daemon."""
    cluster.start()
    _, plain = run(cluster, "r0")
    pod, app = run(cluster, "k1", "exclusive", handler=handler, **ONE_CPU)
    own = cluster.grant(app)["exclusive"]
    for attempt in (1, 2):
        cluster.cri.stop(app)
        if attempt == 2:
            kill_and_start(cluster)
        cluster.cri.remove(app)
        _, other = run(cluster, f"x{attempt}", "exclusive", **ONE_CPU)
        assert cluster.grant(other)["cpu_class"] == "none"
        assert cluster.allocation()["pools"]["exclusive"] == own
        assert own not in {cluster.cgroup(plain), cluster.cgroup(other)}
        app = cluster.cri.create(pod, "app", pod_name="k1", attempt=attempt, **ONE_CPU)
        cluster.cri.start(app)
        assert cluster.grant(app)["exclusive"] == own
    if handler:
        cluster.wait_exclusive(pod, own)


def test_no_pool_change_gives_a_vm_more_vcpus(cluster: Allotted) -> None:
    """A Kata container without a CPU quota keeps its vCPUs while pools shrink and grow (D14)."""
    cluster.start()
    pod, free = run(cluster, "k0", handler="kata", cpu_shares=512)
    count = len(cluster.vcpus(pod))
    assert cluster.grant(free)["cpuset"] == ""
    for _ in range(2):
        other, own = run(cluster, "k1", "exclusive", handler="kata", **ONE_CPU)
        held = cluster.grant(own)["exclusive"]
        cluster.wait_placed(pod, {0, 1} - {int(held)})
        assert len(cluster.vcpus(pod)) == count
        cluster.cri.stop_pod(other)
        cluster.wait_placed(pod, {0, 1})
        assert len(cluster.vcpus(pod)) == count
        cluster.cri.remove_pod(other)
    record = cluster.node.registered()[free]
    assert record.cpus is None


def test_a_cpuset_that_somebody_changed(cluster: Allotted) -> None:
    """A cgroup that allows more than was given is seen by the audit, and put right."""
    settings = cluster.node.settings
    settings["audit"] = {"affinity_s": 0.5, "deep_s": 0.5}
    cluster.node.config.write_text(json.dumps(settings))
    cluster.start()
    _, plain = run(cluster, "r0")
    run(cluster, "k1", "exclusive", handler="kata", **ONE_CPU)
    given = cluster.cgroup(plain)
    cluster.cgroup_file(plain).write_text("0-1")
    wait_for(lambda: cluster.grant(plain)["pending"] == given, "the audit to see it")
    run(cluster, "r1")
    assert cluster.cgroup(plain) == given


def test_a_vm_whose_cpuset_was_not_applied(cluster: Allotted) -> None:
    """Its cgroup allows more than was sent: the audit sees it, the next answer puts it right."""
    settings = cluster.node.settings
    settings["audit"] = {"affinity_s": 0.5, "deep_s": 0.5}
    cluster.node.config.write_text(json.dumps(settings))
    cluster.start()
    pod, app = run(cluster, "k1", "exclusive", handler="kata", **ONE_CPU)
    own = cluster.grant(app)["exclusive"]
    cluster.wait_exclusive(pod, own)
    assert cluster.sandbox_cgroup(pod) == own
    cluster.sandbox_cgroup_file(pod).write_text("0-1")
    wait_for(lambda: cluster.grant(app)["pending"] == own, "the audit to see it")
    run(cluster, "r1")
    wait_for(lambda: cluster.sandbox_cgroup(pod) == own, "the cpuset to be written again")
    assert cluster.grant(app)["pending"] is None


def test_switched_off_it_gives_everything_back(cluster: Allotted) -> None:
    """With alloc.policy none the first Synchronize restores all CPUs of our cpusets."""
    cluster.start()
    _, plain = run(cluster, "r0")
    pod, app = run(cluster, "k1", "exclusive", handler="kata", **ONE_CPU)
    own = cluster.grant(app)["exclusive"]
    assert {cluster.cgroup(plain), own} == {"0", "1"}
    assert cluster.node.daemon is not None
    cluster.node.daemon.terminate()
    cluster.node.settings["alloc"] = {"policy": "none"}
    cluster.node.config.write_text(json.dumps(cluster.node.settings))
    cluster.start()
    wait_for(lambda: cluster.cgroup(plain) == "0-1", "Synchronize's updates to be applied")
    wait_for(lambda: cluster.sandbox_cgroup(pod) == "0-1", "the sandbox's too")
    shown = cluster.node.ask("state")
    assert shown["allocation"] is None
    assert "alloc-left-behind" not in {note["code"] for note in shown["notes"]}
    _, late = run(cluster, "r1")
    assert cluster.cgroup(late) == "0-1"


def test_a_plugin_before_us_is_left_alone(cluster: Allotted) -> None:
    """A container with another plugin's cpuset keeps it, starts, and is not moved later."""
    cluster.start()
    with rival(cluster.containerd.nri_socket, index="50", cpus="0") as other:
        _, plain = run(cluster, "r0")
        _, app = run(cluster, "k1", "exclusive", handler="kata", **ONE_CPU)
        assert other.creations == 2
        assert cluster.cgroup(plain) == "0"
        assert cluster.allocation()["grants"] == []
        (refused,) = cluster.allocation()["refused"]
        assert (refused["id"], refused["kind"]) == (app, "foreign-plugin")
        run(cluster, "r1")
        assert "another NRI plugin" in cluster.allocation()["suspended"]


def test_a_plugin_behind_us_fails_nobody_twice(cluster: Allotted) -> None:
    """Two plugins that set the same fail a creation; its next try goes through without us."""
    cluster.node.settings["nri"]["index"] = "10"
    cluster.node.config.write_text(json.dumps(cluster.node.settings))
    cluster.start()
    with rival(cluster.containerd.nri_socket, index="50", cpus="0"):
        pod = cluster.cri.run_pod("r0")
        with pytest.raises(grpc.RpcError, match="both tried to set CPU"):
            cluster.cri.create(pod, "app", pod_name="r0")
        again = cluster.cri.create(pod, "app", pod_name="r0")
        cluster.cri.start(again)
        assert cluster.cgroup(again) == "0"
        assert "left alone" in cluster.node.log


def test_kills_at_random_points(cluster: Allotted) -> None:
    """Killed in the middle of anything, the daemon finds a state that what runs agrees with.

    After each kill: no CPU lost, none given twice, every cgroup and every thread as the grants say.
    """
    random = Random(6)
    cluster.start()
    _, plain = run(cluster, "r0")
    for number in range(4):
        with killed_within(cluster, random.uniform(0, 0.4)):
            pod, app = run(cluster, f"k{number}", "exclusive", handler="kata", **ONE_CPU)
        agreed(cluster, plain, pod, app)
        with killed_within(cluster, random.uniform(0, 0.1)):
            cluster.cri.stop(app)
        assert cluster.allocation()["pools"]["exclusive"]
        with killed_within(cluster, random.uniform(0, 0.1)):
            cluster.cri.stop_pod(pod)
        agreed(cluster, plain, pod)
        cluster.cri.remove_pod(pod)
