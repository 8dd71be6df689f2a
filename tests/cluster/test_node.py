"""The chart on a real node: helm, controllers, scheduler, kubelet, containerd, and the image.

The kubelet has the static policy, so it gives the first pod, a VM of minikata, this machine's
second CPU, and its third one where there is one.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.cpuset import CpuSet
from scripts.packages.parts import NOT_HERE
from tests.cluster.realnode import RealKubelet, pod, real_kubelet, run_pod, why_not
from tests.support.containerd import RELEASES, Containerd, Release, private_containerd
from tests.support.controlplane import NEEDS_CLUSTER, ControlPlane, control_plane, controllers
from tests.support.daemon import Node, private_node
from tests.support.waiting import SCALE, wait_for

PROJECT = Path(__file__).resolve().parents[2]
NODE, SPACE = "node-8", "kata-pin"
GIVEN = CpuSet([1, 2][: (os.cpu_count() or 1) - 1])
"""Two, if possible: with cgroup v2 a VM with one CPU has nothing left to place."""
IMAGE = "KATA_PIN_IMAGE"
PLUGIN = PROJECT / "hooks/kubectl/kubectl-kata_pin"
WIDTH = 72
"""Columns of a narrow terminal."""
WAIT = ("--wait", "--timeout", f"{200 * SCALE:g}s")

pytestmark = [
    NEEDS_CLUSTER,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.root,
    pytest.mark.qemu,
    pytest.mark.timeout(900 * SCALE),
]


@dataclass(frozen=True)
class Site:
    """A cluster of one node; `first` is where the VM's threads were before kata-pin came."""

    cluster: ControlPlane
    containerd: Containerd
    node: Node
    kubelet: RealKubelet
    sandbox: str
    first: dict[int, set[int]]
    values: Path

    def threads(self) -> dict[int, set[int]]:
        """Return the affinity of each thread of the VMM."""
        pid = int((self.node.dirs.vc / "vm" / self.sandbox / "pid").read_text())
        return {int(tid): os.sched_getaffinity(int(tid)) for tid in os.listdir(f"/proc/{pid}/task")}

    def helm(self, *arguments: str) -> None:
        """Run helm in kata-pin's namespace."""
        done = self.cluster.run("helm", *arguments, "-n", SPACE, check=False)
        assert done.returncode == 0, done.stderr + self.described()

    def described(self) -> str:
        """Return what Kubernetes and the containers say of kata-pin's pods."""
        kubectl, selector = self.cluster.kubectl, f"app.kubernetes.io/name={SPACE}"
        words = [kubectl("describe", "pods", "-n", SPACE, check=False)[-6000:]]
        for one in ("daemon", "reporter", "config-check", "undo"):
            chosen = ("logs", "-n", SPACE, "-l", selector, "-c", one, "--tail", "40")
            words.append(f"{one}: {kubectl(*chosen, check=False)}")
        return "\n".join([*words, self.kubelet.said()[-2000:]])

    def plugin(self, *arguments: str) -> Any:
        """Return the document of a command of `kubectl kata-pin`."""
        done = subprocess.run(
            [str(PLUGIN), *arguments, "-o", "json"],
            env=self.cluster.environment, capture_output=True, text=True, check=False,
            timeout=60 * SCALE,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def daemons_pod(self) -> str:
        """Return the name of the pod that DaemonSet's controller made."""
        (one,) = self.cluster.get("pods", "-n", SPACE, "-l", "app.kubernetes.io/component=node")[
            "items"
        ]
        return str(one["metadata"]["name"])


@pytest.fixture(params=RELEASES)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """A node with a running VM, into which the chart is to be installed."""
    folder, release = Path(tempfile.mkdtemp(prefix="kn")), request.param
    assert isinstance(release, Release)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        for name in ("cp", "image", "place"):
            (folder / name).mkdir()
        archive = image(folder / "image")
        cluster = stack.enter_context(control_plane(folder / "cp"))
        stack.enter_context(controllers(cluster))
        node = stack.enter_context(private_node())
        containerd = stack.enter_context(
            private_containerd(folder / "place", node.dirs, release=release, pivot=True)
        )
        shutil.copy(archive, containerd.shared / "kata-pin.tar")
        containerd.import_image("kata-pin.tar")
        kubelet = stack.enter_context(
            real_kubelet(
                cluster, containerd, NODE,
                cpuManagerPolicy="static", reservedSystemCPUs="0", cpuManagerReconcilePeriod="1s",
            )
        )  # fmt: skip
        cluster.kubectl("label", "node", NODE, "katacontainers.io/kata-runtime=true")
        cluster.kubectl("create", "namespace", "shop")
        sandbox, _ = run_pod(
            kubelet, cluster, containerd, pod("web", NODE, str(len(GIVEN)), runtimeClassName="kata")
        )
        values = folder / "values.json"
        values.write_text(json.dumps(chart_values(containerd)))
        made = Site(cluster, containerd, node, kubelet, sandbox, {}, values)
        made.first.update(made.threads())
        yield made


def image(folder: Path) -> Path:
    """Build the image of the files as they are; in a lab machine it is there."""
    if built := os.environ.get(IMAGE):
        return Path(built)
    done = subprocess.run(
        [str(PROJECT / "scripts/image"), "--work-tree", "--folder", str(folder)],
        capture_output=True, text=True, check=False, env={**os.environ, "VENV": sys.prefix},
    )  # fmt: skip
    if done.returncode == NOT_HERE:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split()[1])


def chart_values(containerd: Containerd) -> dict[str, Any]:
    """Return what is elsewhere on this node than on others."""
    state = containerd.shared / "kubelet" / "root"
    return {
        "image": {"pullPolicy": "Never"},
        "undo": {"timeoutSeconds": int(150 * SCALE)},
        "config": {
            "version": 1,
            "nri": {"enabled": "yes"},
            "audit": {"affinity_s": 1, "deep_s": 5},
            "isolation": {"watch": False},  # other programs of this machine use the CPU too
            "paths": {"kubelet_state": str(state / "cpu_manager_state")},
        },
        "paths": {
            "nri": str(containerd.shared),
            "kubelet": str(state),
            "cdi": "",
            "kataConfigs": ["/opt/kata"],
        },
        # with two CPUs the VM has the one that is left to pods
        "resources": {
            "daemon": {"requests": {"cpu": "0"}},
            "reporter": {"requests": {"cpu": "0"}},
        },
    }


def test_life_of_an_installation(site: Site) -> None:
    """Installed, upgraded, rolled back and removed by helm, beside a VM that runs all the time.

    The Job of the uninstall does its work from the host's network here, see `in_host_network`.
    """
    chart = str(PROJECT / "hooks/charts/kata-pin")
    given = ("--values", str(site.values))
    site.helm("install", SPACE, chart, "--create-namespace", *given, *WAIT)
    rollout = ("rollout", "status", f"daemonset/{SPACE}", "-n", SPACE, f"--timeout={90 * SCALE:g}s")
    with described(site):
        site.cluster.kubectl(*rollout)
        wait_for(lambda: placement(site).get("sandboxes") == 1, "the node's object", 30)
        wait_for(lambda: site.threads() != site.first, "the VM to be placed", 30)
        assert_shown(site)
        assert_fits_a_terminal(site)
        assert_not_resized(site)
    before, old = site.threads(), site.daemons_pod()
    with sampled(site) as seen:
        # the probes go to another address then
        site.helm("upgrade", SPACE, chart, *given, "--set", "reporter.address=$(HOST_IP)", *WAIT)
        site.cluster.kubectl(*rollout)
        assert (new := site.daemons_pod()) != old
        site.helm("rollback", SPACE, *WAIT)
        site.cluster.kubectl(*rollout)
        assert site.daemons_pod() not in {old, new}
    print(f"{seen.count} looks, the longest gap {seen.longest_s * 1000:.0f} ms")
    assert seen.count > 100
    assert seen.states == [before]
    assert_shown(site)
    with in_host_network(site):
        site.helm("uninstall", SPACE, *WAIT)
    assert site.threads() == site.first
    left = site.cluster.kubectl("get", "pods,daemonsets", "-n", SPACE, "-o", "name")
    assert "daemonset" not in left


@contextmanager
def in_host_network(site: Site) -> Iterator[None]:
    """Put the Job's pods into the host's network: this node has no other.

    A mutating policy of the API server does it, so the chart's own objects stay what they are.
    """
    group = {"apiVersion": "admissionregistration.k8s.io/v1beta1"}
    matched = {"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"]}
    spec = {
        "matchConstraints": {"resourceRules": [{**matched, "resources": ["jobs"]}]},
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [
            {
                "patchType": "ApplyConfiguration",
                "applyConfiguration": {
                    "expression": "Object{spec: Object.spec{template: Object.spec.template{"
                    "spec: Object.spec.template.spec{hostNetwork: true}}}}"
                },
            }
        ],
    }
    name = {"metadata": {"name": "host-network"}}
    site.cluster.apply(
        {**group, "kind": "MutatingAdmissionPolicy", **name, "spec": spec},
        {
            **group,
            "kind": "MutatingAdmissionPolicyBinding",
            **name,
            "spec": {"policyName": "host-network"},
        },
    )
    time.sleep(3 * SCALE)  # the API server looks for new policies each second
    yield


def assert_shown(site: Site) -> None:
    """Assert that the object, and `kata-pin show` in the daemon's pod, say what the kernel says."""
    status = placement(site)
    assert (status["exclusive"], status["violations"]) == (str(GIVEN), 0)
    (row,) = site.plugin("pods", "-n", "shop")["pods"]
    assert row["name"] == "web"
    (shown,) = site.plugin("show", "web", "-n", "shop")["sandboxes"]
    assert (shown["state"], shown["exclusive"]) == ("ok", str(GIVEN))
    known = site.threads()
    of_vmm = [one for one in shown["threads"] if one["tid"] in known]
    assert {one["role"] for one in of_vmm} >= {"vcpu", "emulator"}
    for one in of_vmm:
        assert one["expected"] == str(CpuSet(known[one["tid"]]))


def assert_fits_a_terminal(site: Site) -> None:
    """Assert that the node's command knows the width of the terminal of `kubectl kata-pin`."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, WIDTH))
    process = subprocess.Popen(
        [str(PLUGIN), "show", "web", "-n", "shop"],
        env=site.cluster.environment, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    with open(ours, "rb", buffering=0) as file, contextlib.suppress(OSError):  # the end of it
        while data := file.read(4096):
            said += data
    assert process.wait(30 * SCALE) == 0, said
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said.decode())
    assert "shop/web" in plain
    assert max(map(len, plain.splitlines())) <= WIDTH, plain


def assert_not_resized(site: Site) -> None:
    """Assert that this kubelet resizes no pod with exclusive CPUs, and that all stays as it is."""
    amount = {"cpu": "500m", "memory": "300Mi"}  # less: not refused for want of room
    container = {"name": "app", "resources": {"requests": amount, "limits": amount}}
    change = json.dumps({"spec": {"containers": [container]}})
    site.cluster.kubectl("patch", "pod", "web", "-n", "shop", "--subresource=resize", "-p", change)

    def refusal() -> dict[str, str]:
        conditions = site.cluster.get("pod", "web", "-n", "shop")["status"]["conditions"]
        return next((one for one in conditions if one["type"] == "PodResizePending"), {})

    refused = wait_for(refusal, "the kubelet's answer to the resize", 60)
    assert refused["reason"] == "Infeasible", refused
    print(refused["message"])
    assert_shown(site)


def placement(site: Site) -> dict[str, Any]:
    """Return the status of the node's object, empty while there is none."""
    items = site.cluster.get("nodeplacements.kata-pin.io")["items"]
    return dict(items[0].get("status", {})) if items else {}


@contextmanager
def described(site: Site) -> Iterator[None]:
    """Add what the cluster says of kata-pin to a failure."""
    try:
        yield
    except Exception as error:
        error.add_note(site.described())
        raise


@dataclass
class Seen:
    """What a sampler saw: each state that differed from the one before, and how often it looked."""

    states: list[dict[int, set[int]]] = field(default_factory=list)
    count: int = 0
    longest_s: float = 0.0


@contextmanager
def sampled(site: Site) -> Iterator[Seen]:
    """Look at all affinities of the VM every 10 ms while the block runs."""
    seen, over = Seen(), threading.Event()

    def look() -> None:
        last = time.monotonic()
        while not over.wait(0.01):
            state = site.threads()
            now = time.monotonic()
            seen.longest_s, last = max(seen.longest_s, now - last), now
            seen.count += 1
            if not seen.states or seen.states[-1] != state:
                seen.states.append(state)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        with described(site):
            yield seen
    finally:
        over.set()
        looker.join()
