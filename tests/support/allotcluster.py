"""A private node and containerd with an allocator: what it decides, and what has come of it.

The node has two CPUs. runc's containers are judged by their cgroup's cpuset, Kata's by the affinity
of QEMU's threads and by the cpuset of the sandbox's cgroup, which minikata writes as Kata does.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kata_pin.base.cpuset import CpuSet
from tests.support.cricluster import Cluster
from tests.support.daemon import Json
from tests.support.waiting import wait_for

KEY = "cpu-policy.kata-pin.io"
ALLOC: Json = {
    "policy": "annotation",
    "shared_minimum": "1",
    "eligibility": "relaxed",
    "allow": [{"namespace": "shop"}],
}
ONE_CPU: Json = {"cpu_quota": 100_000, "cpu_period": 100_000, "cpu_shares": 1024}
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
        return self.cgroup_file(container).read_text().strip()

    def cgroup_file(self, container: str, name: str = "cpuset.cpus") -> Path:
        """Return a file of a runc container's cgroup, by default that of its cpuset."""
        parent = (
            Path("/sys/fs/cgroup") / name.partition(".")[0] / self.containerd.cgroup.lstrip("/")
        )
        (file,) = parent.glob(f"**/{container}/{name}")
        return file

    def pid(self, container: str) -> int:
        """Return the first process of a runc container."""
        return int(
            self.cgroup_file(container, "cpuset.cpus")
            .with_name("cgroup.procs")
            .read_text()
            .split()[0]
        )

    def sandbox_cgroup(self, pod: str) -> str:
        """Return the cpuset of the cgroup that minikata made for a sandbox."""
        return self.sandbox_cgroup_file(pod).read_text().strip()

    def sandbox_cgroup_file(self, pod: str) -> Path:
        """Return the file of that cpuset."""
        parent = Path("/sys/fs/cgroup/cpuset") / self.containerd.cgroup.lstrip("/")
        (file,) = parent.glob(f"**/kata_{pod}/cpuset.cpus")
        return file

    def vcpus(self, pod: str) -> dict[str, str]:
        """Return the affinity of each vCPU thread of a sandbox, by its label."""
        shown = self.shown(pod)
        assert shown is not None
        return {
            one["label"]: _affinity(one["tid"]) for one in shown["threads"] if one["role"] == "vcpu"
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


def run(cluster: Allotted, name: str, policy: str = "", **options: Any) -> tuple[str, str]:
    """Start a pod of one container; return the pod's and the container's id."""
    handler = options.pop("handler", "")
    annotations = {KEY: policy} if policy else {}
    pod = cluster.cri.run_pod(name, handler, annotations)
    container = cluster.cri.create(pod, "app", pod_name=name, **options)
    cluster.cri.start(container)
    return pod, container


def order(cluster: Allotted, pod: str, cpu_class: str) -> None:
    """Order a class for a pod as an administrator does."""
    done = cluster.node.cli("policy", "set", pod, cpu_class)
    assert done.returncode == 0, done.stderr


def kill_and_start(cluster: Allotted) -> None:
    assert cluster.node.daemon is not None
    cluster.node.daemon.kill()
    cluster.start()


@contextlib.contextmanager
def killed_within(cluster: Allotted, seconds: float) -> Iterator[None]:
    """Kill the daemon so many seconds into the block, and start it again after it."""
    assert cluster.node.daemon is not None
    timer = threading.Timer(seconds, cluster.node.daemon.process.kill)
    timer.start()
    yield
    timer.join()
    kill_and_start(cluster)


def agreed(cluster: Allotted, plain: str, pod: str, app: str = "") -> None:
    """Wait until grants, cgroups and threads agree; `app` is a container with its own CPU."""

    def agree() -> bool:
        shown = cluster.allocation()
        grants = {one["id"]: one for one in shown["grants"]}
        own = grants[app]["exclusive"] if app else ""
        if {own, shown["pools"]["shared"]} != ({"0", "1"} if app else {"", "0-1"}):
            return False
        followed = cluster.cgroup(plain) == shown["pools"]["shared"] == grants[plain]["cpus"]
        sandbox = cluster.shown(pod) or {"exclusive": None if app else ""}
        return bool(followed and sandbox["exclusive"] == own)

    try:
        wait_for(agree, "everything to agree", 20)
    except TimeoutError as error:
        error.add_note(f"{cluster.allocation()}\n{cluster.cgroup(plain)}\n{cluster.shown(pod)}")
        error.add_note(cluster.node.log[-5000:])
        raise
    if app:
        own = cluster.grant(app)["exclusive"]
        assert cluster.grant(app)["cpuset"] == own
        assert own in cluster.vcpus(pod).values()
