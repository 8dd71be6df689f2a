"""A pod with exclusive CPUs is resized in place: a real API server, kubelet, containerd, a VM.

A kubelet with the gate on accepts a resize and changes the container's shares, but its static
policy gives no other CPUs (seen here with 1.34.1 and 1.37.2, read in 1.38.0-beta.0). So the second
half plays that part: the kubelet is killed, its checkpoint gets another entry beside the
`baselines` that 1.37 wrote itself, and the same kubelet starts with it. It keeps both, and its
reconciliation writes the container's cpuset.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import KubeletState
from kata_pin.peers.kubelet.checkpoint import dump_checkpoint, parse_checkpoint
from tests.cluster.realnode import RealKubelet, pod, real_kubelet, run_pod, why_not
from tests.kubelet.conftest import BOTH
from tests.support.checkpoint import packed, replace
from tests.support.containerd import private_containerd
from tests.support.controlplane import NEEDS_CLUSTER, ControlPlane, control_plane
from tests.support.cricluster import Cluster
from tests.support.daemon import private_node
from tests.support.waiting import SCALE, wait_for

NODE = "node-9"
MANY = (os.cpu_count() or 1) > 3
BEFORE, AFTER = (CpuSet([1, 2]), CpuSet([1, 2, 3])) if MANY else (CpuSet([1]), CpuSet([0]))
"""The pod's CPUs: with two CPUs they can only move, to the one that was reserved before."""

pytestmark = [
    NEEDS_CLUSTER,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.root,
    pytest.mark.qemu,
    pytest.mark.timeout(600 * SCALE),
]


@dataclass(frozen=True)
class Place:
    """A cluster of one node with kata-pin, and one pod: `sandbox` and `app`."""

    cluster: ControlPlane
    kubelet: RealKubelet
    node: Cluster
    sandbox: str
    app: str

    def entry(self) -> CpuSet:
        """Return what the checkpoint gives the container."""
        (entries,) = parse_checkpoint(self.kubelet.checkpoint.read_bytes()).entries.values()
        return entries["app"]

    def baseline(self) -> str:
        """Return what the checkpoint gave it first, as kubelet 1.37 has it."""
        (baselines,) = content(self.kubelet.checkpoint)["baselines"].values()
        return str(baselines["app"]["baseline"])

    def container(self) -> dict[str, Any]:
        """Return what kata-pin shows of the container."""
        shown = self.node.shown(self.sandbox)
        assert shown is not None
        return next(dict(one) for one in shown["containers"] if one["id"] == self.app)

    def paired(self) -> dict[str, CpuSet]:
        """Return where each vCPU thread may run, of those that are on exclusive CPUs."""
        shown = self.node.shown(self.sandbox)
        assert shown is not None
        affinities = {
            one["label"]: CpuSet(os.sched_getaffinity(one["tid"]))
            for one in shown["threads"]
            if one["role"] == "vcpu"
        }
        return {label: cpus for label, cpus in affinities.items() if len(cpus) == 1}

    def wait_exclusive(self, cpus: CpuSet) -> None:
        """Wait until kata-pin shows these exclusive CPUs and has pinned a vCPU to each."""

        def placed() -> bool:
            shown = self.node.shown(self.sandbox)
            assert shown is not None
            on = {str(one) for one in self.paired().values()}
            state = (shown["state"], shown["exclusive"])
            return state == ("ok", str(cpus)) and {str(cpu) for cpu in cpus} <= on

        try:
            wait_for(placed, f"vCPUs on {cpus}", 60)
        except TimeoutError as error:
            error.add_note(json.dumps(self.node.shown(self.sandbox))[:4000])
            error.add_note(self.node.node.log[-3000:] + self.kubelet.said())
            raise


@pytest.fixture(params=BOTH)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The pod runs, and its VM is placed."""
    folder = Path(tempfile.mkdtemp(prefix="kr"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        (folder / "cp").mkdir()
        cluster = stack.enter_context(control_plane(folder / "cp"))
        node = stack.enter_context(private_node())
        containerd = stack.enter_context(private_containerd(folder, node.dirs))
        cluster.kubectl("create", "namespace", "shop")
        kubelet = stack.enter_context(
            real_kubelet(
                cluster, containerd, NODE, request.param,
                cpuManagerPolicy="static", reservedSystemCPUs="0", cpuManagerReconcilePeriod="1s",
                featureGates={"InPlacePodVerticalScalingExclusiveCPUs": True},
            )
        )  # fmt: skip
        paths = node.settings["paths"] | {"kubelet_state": str(kubelet.checkpoint)}
        site = Cluster(node, containerd, paths=paths)
        site.start()
        wanted = pod("web", NODE, str(len(BEFORE)), runtimeClassName="kata")
        sandbox, app = run_pod(kubelet, cluster, containerd, wanted)
        yield Place(cluster, kubelet, site, sandbox, app)


def test_a_resize_beside_a_live_kubelet(place: Place) -> None:
    """Pairs stay as long as the checkpoint and the cpuset disagree, and follow the cpuset."""
    place.wait_exclusive(BEFORE)
    assert place.entry() == BEFORE
    before = place.paired()

    resize(place, len(BEFORE) * 1000 - 500)
    assert place.entry() == BEFORE
    place.wait_exclusive(BEFORE)
    assert place.paired() == before

    place.kubelet.kill()
    default = rewrite(place.kubelet.checkpoint, AFTER)
    waiting = f"its checkpoint entry is {AFTER}, its cpuset is still {BEFORE}"
    wait_for(lambda: waiting in place.container()["reason"], "the entry to be known", 30)
    assert (place.container()["cpus"], place.paired()) == (str(BEFORE), before)

    place.kubelet.configure(reservedSystemCPUs=str(min(default)))
    place.kubelet.start()
    place.wait_exclusive(AFTER)
    assert place.container()["cpus"] == str(AFTER)
    place.kubelet.assert_runs()
    assert place.entry() == AFTER
    if content(place.kubelet.checkpoint):
        assert place.baseline() == str(BEFORE)


def resize(place: Place, millis: int) -> None:
    """Resize the pod and wait until the kubelet has done it."""
    amount = {"cpu": f"{millis}m", "memory": "300Mi"}
    container = {"name": "app", "resources": {"requests": amount, "limits": amount}}
    change = json.dumps({"spec": {"containers": [container]}})
    place.cluster.kubectl("patch", "pod", "web", "-n", "shop", "--subresource=resize", "-p", change)

    def done() -> bool:
        status = place.cluster.get("pod", "web", "-n", "shop")["status"]
        (found,) = status["containerStatuses"]
        waiting = [one for one in status["conditions"] if one["type"].startswith("PodResize")]
        return found["resources"]["requests"]["cpu"] == amount["cpu"] and not waiting

    try:
        wait_for(done, "the resize", 90)
    except TimeoutError as error:
        error.add_note(json.dumps(place.cluster.get("pod", "web", "-n", "shop")["status"]))
        error.add_note(place.kubelet.said())
        raise


def rewrite(file: Path, cpus: CpuSet) -> CpuSet:
    """Give the one container these CPUs in the checkpoint; return the other ones."""
    state = parse_checkpoint(file.read_bytes())
    ((uid, entries),) = state.entries.items()
    rest = (state.default | entries["app"]) - cpus
    if data := content(file):
        data |= {"entries": {uid: {"app": str(cpus)}}, "defaultCpuSet": str(rest)}
        replace(file, packed(data))
    else:
        changed = KubeletState("static", rest, {uid: {"app": cpus}})
        replace(file, dump_checkpoint(changed).decode())
    return rest


def content(file: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of version 4, nothing of an older one."""
    return dict(json.loads(json.loads(file.read_text()).get("data", "{}")))
