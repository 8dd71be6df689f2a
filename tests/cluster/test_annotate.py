"""Running pods are changed by `kubectl annotate`: a real API server, kubelet and containerd.

kata-pin decides the cpusets; it learns of annotations from the kubelet's own list of pods, set up
by the commands that docs/allocation.md prints. Pods of handler `kata` are minikata's VMs.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.realnode import CGROUPS, RealKubelet, pod, real_kubelet, run_pod, why_not
from tests.support.allotcluster import KEY, Allotted
from tests.support.containerd import private_containerd
from tests.support.controlplane import NEEDS_CLUSTER, ControlPlane, control_plane
from tests.support.daemon import private_node
from tests.support.waiting import wait_for

PROJECT = Path(__file__).resolve().parents[2]
NODE = "node-7"
CRANES_KEY = "qos.gocrane.io/cpu-manager"

pytestmark = [
    NEEDS_CLUSTER,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(
        os.cpu_count() != 2 or not (CGROUPS / "cpuset").is_dir(),
        reason="the tests know a node of two CPUs with cgroup v1",
    ),
    pytest.mark.root,
    pytest.mark.qemu,
    pytest.mark.timeout(400),
]


@dataclass(frozen=True)
class Place:
    """A cluster of one node."""

    cluster: ControlPlane
    allotted: Allotted
    kubelet: RealKubelet

    def run(self, name: str, cpus: str, **fields: Any) -> tuple[str, str]:
        """Start a pod and wait until it runs; return the ids of its sandbox and its container."""
        wanted = pod(name, NODE, cpus, **fields)
        return run_pod(self.kubelet, self.cluster, self.allotted.containerd, wanted)

    def remove(self, *names: str) -> None:
        """Delete pods, and wait until kata-pin knows."""
        self.cluster.kubectl("delete", "pod", *names, "-n", "shop")
        wait_for(lambda: not self.allotted.allocation()["grants"], "grants to end", 30)

    def annotate(self, name: str, change: str) -> None:
        """Run `kubectl annotate` as an operator does."""
        self.cluster.kubectl("annotate", "pod", name, "-n", "shop", "--overwrite", change)

    def identity(self, name: str) -> tuple[object, ...]:
        """Return what another instance of a pod would not have in common with this one."""
        found = self.cluster.get("pod", name, "-n", "shop")
        (container,) = found["status"]["containerStatuses"]
        uid = found["metadata"]["uid"]
        return uid, container["containerID"], container["restartCount"], container["state"]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """A control plane, a node with a real kubelet, and kata-pin on it."""
    folder = Path(tempfile.mkdtemp(prefix="kn"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        (folder / "cp").mkdir()
        cluster = stack.enter_context(control_plane(folder / "cp"))
        node = stack.enter_context(private_node())
        containerd = stack.enter_context(private_containerd(folder, node.dirs))
        cluster.kubectl("create", "namespace", "shop")
        kubelet = stack.enter_context(real_kubelet(cluster, containerd, NODE))
        token = folder / "kubelet-token"
        token.write_text(run_documented_commands(cluster))
        allotted = Allotted(
            node,
            containerd,
            alloc={
                "policy": "annotation",
                "shared_minimum": "1",
                "eligibility": "relaxed",
                "allow": [{"namespace": "shop"}],
                "orders": str(node.root / "policies"),
                "cri": str(containerd.cri_socket),
                "pods_url": f"{kubelet.url}/pods",
                "pods_name": NODE,
                "pods_ca": str(kubelet.certificate),
                "pods_token": str(token),
                "pods_s": 1,
            },
        )
        allotted.start()
        yield Place(cluster, allotted, kubelet)


def run_documented_commands(cluster: ControlPlane) -> str:
    """Run the commands of docs/allocation.md that make a token for the kubelet; return it."""
    text = (PROJECT / "docs" / "allocation.md").read_text()
    commands = re.findall(r"^ {6}kubectl (.*)$", text, re.MULTILINE)
    assert [one.split(" > ")[0].split()[-1] for one in commands][-1] == "--duration=24h"
    return [cluster.kubectl(*one.split(" > ")[0].split()) for one in commands][-1].strip()


def test_pods_are_changed_by_kubectl_annotate(place: Place) -> None:
    """Crane's stories: none to share, share to exclusive, exclusive to share, and none again.

    Nothing is made anew: the pod, its container, its QEMU and its vCPUs are the same all the time.
    Grants, runc's and the VM's cgroups and the affinities of vCPU threads agree after each change.
    """
    allotted = place.allotted
    sandbox, app = place.run("web", "1", runtimeClassName="kata")
    _, plain = place.run("beside", "500m")
    qemu = (allotted.node.dirs.vc / "vm" / sandbox / "pid").read_text()
    before, vcpus = place.identity("web"), len(allotted.vcpus(sandbox))
    assert allotted.grant(app)["cpu_class"] == "none"

    place.annotate("web", f"{KEY}=share")
    wait_for(lambda: allotted.grant(app)["cpu_class"] == "share", "the class share")
    own = allotted.grant(app)["cpus"]
    (other,) = {"0", "1"} - {own}
    wait_for(lambda: set(allotted.vcpus(sandbox).values()) == {own}, "the vCPUs on their CPU")
    assert allotted.cgroup(plain) == "0-1"

    place.annotate("web", f"{KEY}=exclusive")
    allotted.wait_exclusive(sandbox, own)
    wait_for(lambda: allotted.cgroup(plain) == other, "the other pod to leave the CPU")
    wait_for(lambda: allotted.sandbox_cgroup(sandbox) == own, "the VM's cgroup to follow")

    place.annotate("web", f"{KEY}=share")
    allotted.wait_exclusive(sandbox, "")
    wait_for(lambda: allotted.cgroup(plain) == "0-1", "the other pod to have both CPUs")
    assert allotted.grant(app)["cpus"] == own

    place.annotate("web", f"{KEY}-")
    wait_for(lambda: allotted.grant(app)["cpu_class"] == "none", "the class none")
    assert place.identity("web") == before
    assert (allotted.node.dirs.vc / "vm" / sandbox / "pid").read_text() == qemu
    assert len(allotted.vcpus(sandbox)) == vcpus
    place.remove("web", "beside")


def test_cranes_own_annotation_counts_for_runcs_pods(place: Place) -> None:
    """exclusive to share on a pod without a VM: its cgroup follows, and so do the others'."""
    allotted = place.allotted
    _, app = place.run("crane", "1", annotations={CRANES_KEY: "exclusive"})
    _, plain = place.run("neighbour", "500m")
    own = allotted.grant(app)["exclusive"]
    (other,) = {"0", "1"} - {own}
    assert allotted.cgroup(app) == own
    wait_for(lambda: allotted.cgroup(plain) == other, "the neighbour's cpuset")
    before, pid = place.identity("crane"), allotted.pid(app)
    place.annotate("crane", f"{CRANES_KEY}=share")
    wait_for(lambda: allotted.cgroup(plain) == "0-1", "the neighbour to have both CPUs")
    assert allotted.grant(app)["cpu_class"] == "share"
    assert (place.identity("crane"), allotted.pid(app)) == (before, pid)
    place.remove("crane", "neighbour")
