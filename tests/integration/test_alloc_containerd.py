"""Our own allocator under the real containerd 1.7: what NRI answers, cgroups and threads agree.

The node has two CPUs here, so an exclusive one leaves one for everybody else. runc's containers are
judged by their cgroup's cpuset, Kata's by the affinity of QEMU's threads and by the cpuset of the
sandbox's cgroup, which minikata writes as Kata does.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kata_pin.model.cpuset import CpuSet
from tests.support.containerd import private_containerd, why_not
from tests.support.cricluster import Cluster
from tests.support.daemon import Json, private_node
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.oci,
    pytest.mark.skipif(why_not() != "", reason=why_not()),
    pytest.mark.skipif(os.cpu_count() != 2, reason="the tests know a node of two CPUs"),
]

KEY = "cpu-policy.kata-pin.io"
ALLOC: Json = {
    "policy": "annotation",
    "shared_minimum": "1",
    "eligibility": "relaxed",
    "allow": [{"namespace": "shop"}],
}
ONE_CPU = {"cpu_quota": 100_000, "cpu_period": 100_000, "cpu_shares": 1024}
"""What the kubelet writes for a request and a limit of one CPU."""


class Allotted(Cluster):
    """A node and its containerd, and an allocator."""

    def allocation(self) -> Json:
        """Return what the daemon shows of the allocator."""
        return dict(self.node.ask("state")["allocation"])

    def grant(self, container: str) -> Json:
        """Return what the daemon shows of a container's grant."""
        return next(one for one in self.allocation()["grants"] if one["id"] == container)

    def cgroup(self, container: str) -> str:
        """Return the cpuset of a runc container's cgroup."""
        parent = Path("/sys/fs/cgroup/cpuset") / self.containerd.cgroup.lstrip("/")
        (file,) = parent.glob(f"**/{container}/cpuset.cpus")
        return file.read_text().strip()

    def sandbox_cgroup(self, pod: str) -> str:
        """Return the cpuset of the cgroup that minikata made for a sandbox."""
        parent = Path("/sys/fs/cgroup/cpuset") / self.containerd.cgroup.lstrip("/")
        (file,) = parent.glob(f"**/kata_{pod}/cpuset.cpus")
        return file.read_text().strip()

    def vcpus(self, pod: str) -> dict[str, str]:
        """Return the affinity of each vCPU thread of a sandbox, by its label."""
        shown = self.shown(pod)
        assert shown is not None
        return {
            one["label"]: _affinity(one["tid"])
            for one in shown["threads"]
            if one["role"] == "vcpu"
        }

    def wait_exclusive(self, pod: str, cpus: str) -> None:
        """Wait until a sandbox is shown with these exclusive CPUs and in order."""

        def stands() -> bool:
            shown = self.shown(pod)
            return shown is not None and (shown["exclusive"], shown["state"]) == (cpus, "ok")

        try:
            wait_for(stands, f"the exclusive CPUs {cpus or 'none'}")
        except TimeoutError as error:
            error.add_note(f"{self.shown(pod)}\n{self.node.log[-6000:]}")
            raise


def _affinity(tid: int) -> str:
    return str(CpuSet(os.sched_getaffinity(tid)))


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="cd"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def cluster(folder: Path) -> Iterator[Allotted]:
    with private_node() as node, private_containerd(folder, node.dirs) as containerd:
        alloc = ALLOC | {"orders": str(node.root / "policies")}
        yield Allotted(node, containerd, alloc=alloc)


def run(cluster: Allotted, name: str, policy: str = "", **options: Any) -> tuple[str, str]:
    """Start a pod of one container; return the pod's and the container's id."""
    handler = options.pop("handler", "")
    annotations = {KEY: policy} if policy else {}
    pod = cluster.cri.run_pod(name, handler, annotations)
    container = cluster.cri.create(pod, "app", pod_name=name, **options)
    cluster.cri.start(container)
    return pod, container


def test_exclusive_cpus_come_and_go(cluster: Allotted) -> None:
    """A Kata pod's exclusive CPU leaves everybody's cpuset in the same answer, and comes back."""
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
    assert cluster.cgroup(plain) == "0-1"
    cluster.wait_exclusive(pod, "")
    assert cluster.allocation()["pools"]["shared"] == "0-1"
