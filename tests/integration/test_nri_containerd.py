"""The NRI plugin under the real containerd 1.7 and 2.4, with pods made through CRI and real QEMUs.

Hooks are not installed and audits do not run: what the daemon knows, it knows from NRI. The runtime
is minikata (tests/e2e/minikata), the container image one program made here.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containerd import RELEASES, Release, private_containerd, why_not
from tests.support.cricluster import Cluster
from tests.support.daemon import private_node
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.oci,
    pytest.mark.skipif(why_not() != "", reason=why_not()),
]

SHORT_TIMEOUT = "400ms"
"""The runtime's patience with plugins where a test makes it wait."""


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> Release:
    found: Release = request.param
    return found


@pytest.fixture
def cluster(folder: Path, release: Release) -> Iterator[Cluster]:
    with (
        private_node() as node,
        private_containerd(folder, node.dirs, release=release) as containerd,
    ):
        yield Cluster(node, containerd)


@pytest.fixture
def impatient(folder: Path, release: Release) -> Iterator[Cluster]:
    with (
        private_node() as node,
        private_containerd(
            folder, node.dirs, release=release, request_timeout=SHORT_TIMEOUT
        ) as containerd,
    ):
        yield Cluster(node, containerd)


def test_a_pod_through_its_life(cluster: Cluster) -> None:
    """Pins stand when StartContainer returns; update, stop and remove are followed at once."""
    cluster.start()
    cri = cluster.cri
    pod = cri.run_pod("p1", "kata")
    one = cri.create(pod, "c1", pod_name="p1", cpuset_cpus="1")
    cri.start(one)
    assert cluster.misplaced(pod, {1}) == []
    cri.update(one, cpuset_cpus="0")
    cluster.wait_placed(pod, {0})
    source = "nri:PostUpdateContainer"  # persist.json's event may come, and be placed, before it
    wait_for(lambda: cluster.node.registered()[one].source == source, "NRI's update")
    record = cluster.node.registered()[one]
    assert str(record.cpus) == "0"
    assert (record.name, record.pod_name, record.pod_namespace) == ("c1", "p1", "shop")
    assert (record.pod_uid, record.handler) == ("uid-p1", "kata")
    two = cluster.run(pod, "c2", cpuset_cpus="1")
    assert cluster.misplaced(pod, {0, 1}) == []
    cri.stop(two)
    cluster.wait_placed(pod, {0})
    assert cluster.node.registered()[two].state == "stopped"
    cri.remove(two)
    wait_for(lambda: cluster.node.registered()[two].state == "deleted", "the removal")
    cri.stop_pod(pod)
    wait_for(lambda: pod not in {c.sandbox_id for c in cluster.node.registered().values()}, "end")
    cri.remove_pod(pod)


def started_with(cluster: Cluster, container: str) -> set[str]:
    """Return the affinities of QEMU's threads when a container's workload was started."""
    pattern = re.compile(rf"^{container} starts with affinities (.*)$", re.MULTILINE)
    texts = [path.read_text() for path in (cluster.containerd.shared / "mk").rglob(".log/*")]
    [found] = [one for text in texts for one in pattern.findall(text)]
    return set(ast.literal_eval(found))


def test_first_threads_are_pinned_before_the_workload_starts(cluster: Cluster) -> None:
    """NRI alone: no hook is in any spec, and StartContainer waits as a hook would.

    What the threads may run on is read by the runtime when it starts the workload.
    """
    cluster.start()
    for number in range(4):
        pod = cluster.cri.run_pod(f"p{number}", "kata")
        one = cluster.cri.create(pod, "c1", pod_name=f"p{number}", cpuset_cpus="1")
        cluster.cri.start(one)
        assert started_with(cluster, one) == {"1"}
        assert "hooks" not in cluster.containerd.spec(one)
        two = cluster.cri.create(pod, "c2", pod_name=f"p{number}", cpuset_cpus="0")
        cluster.cri.start(two)
        assert started_with(cluster, two) == {"0,1"}  # shared: no CPU is one container's alone
    sources = {one.source.partition(":")[0] for one in cluster.node.registered().values()}
    assert "nri" in sources
    assert "hook" not in sources


def test_without_a_daemon_threads_start_anywhere(cluster: Cluster) -> None:
    """What the test above would read if nothing waited."""
    pod = cluster.cri.run_pod("p1", "kata")
    one = cluster.run(pod, "c1", cpuset_cpus="1")
    assert "0,1" in started_with(cluster, one)


def test_pods_of_other_runtimes_leave_nothing(cluster: Cluster) -> None:
    """A runc pod, before the daemon and beside it, is neither recorded nor touched."""
    earlier = cluster.cri.run_pod("r0")
    cluster.start()
    pod = cluster.cri.run_pod("r1")
    container = cluster.run(pod, "c1", cpuset_cpus="1")
    cluster.cri.update(container, cpuset_cpus="0")
    kata = cluster.cri.run_pod("p1", "kata")  # in order: when it is shown, the others are over
    wait_for(lambda: cluster.shown(kata), "the Kata pod to be shown")
    assert {one.sandbox_id for one in cluster.node.registered().values()} == {kata}
    assert cluster.shown(pod) is None
    assert cluster.shown(earlier) is None


def test_synchronize_rebuilds(cluster: Cluster) -> None:
    """A plugin that was away learns everything: new pods, updates and removals."""
    cri = cluster.cri
    pod = cri.run_pod("p1", "kata")
    one = cluster.run(pod, "c1", cpuset_cpus="1")
    two = cluster.run(pod, "c2", cpuset_cpus="0")
    cluster.forget_files(pod)
    cluster.start()
    cluster.wait_placed(pod, {0, 1})
    assert cluster.node.registered()[one].source == "nri:Synchronize"
    assert cluster.node.daemon is not None
    cluster.node.daemon.kill()
    cri.update(one, cpuset_cpus="0")
    cri.stop(two)
    cri.remove(two)
    cluster.forget_files(pod)
    assert cluster.misplaced(pod, {0}) != []  # nobody follows
    cluster.start()
    cluster.wait_placed(pod, {0})
    assert cluster.node.registered()[two].state == "deleted"


def test_containerd_is_restarted(cluster: Cluster) -> None:
    """Pins stay while containerd is away; then the plugin is there again and follows."""
    cluster.start()
    pod = cluster.cri.run_pod("p1", "kata")
    one = cluster.run(pod, "c1", cpuset_cpus="1")
    told = cluster.told
    cluster.containerd.stop()
    assert cluster.misplaced(pod, {1}) == []
    cluster.containerd.start()
    cluster.wait_told(told)
    assert cluster.misplaced(pod, {1}) == []
    cluster.containerd.cri.update(one, cpuset_cpus="0")
    cluster.wait_placed(pod, {0})


def test_a_hung_daemon_does_not_hold_containerd(impatient: Cluster) -> None:
    """With the daemon stopped, containerd loses one timeout and goes on; later all is caught up."""
    impatient.start()
    cri = impatient.cri
    pod = cri.run_pod("p1", "kata")
    one = impatient.run(pod, "c1", cpuset_cpus="1")
    assert impatient.node.daemon is not None
    told = impatient.told
    with impatient.node.daemon.hung():
        began = time.monotonic()
        cri.update(one, cpuset_cpus="0")
        assert time.monotonic() - began < 5
        began = time.monotonic()
        two = impatient.run(pod, "c2", cpuset_cpus="0")
        assert time.monotonic() - began < 5
    impatient.wait_told(told)
    impatient.wait_placed(pod, {0})
    assert set(impatient.node.registered()) >= {one, two}
