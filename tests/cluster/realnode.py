"""A real kubelet on this machine: it joins a control plane and runs pods in a private containerd.

    with real_kubelet(cluster, containerd, "node1") as kubelet:
        cluster.apply(pod("web", kubelet.node, "1"))

It runs in containerd's place (mount namespace and root), so that nothing of this machine is
touched; pods are below the place's own cgroup, and all in the host's network. Its CPU manager is
off unless a test wants it. Programs: scripts/kubelet and scripts/cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.node import VARIABLE as LAB
from tests.kubelet.recording import programs as kubelet_programs
from tests.kubelet.recording import why_not as why_no_kubelet
from tests.kubelet.stage import KERNEL, configuration
from tests.support.containerd import Containerd
from tests.support.containerd import why_not as why_no_containerd
from tests.support.controlplane import ControlPlane
from tests.support.pauseimage import IMAGE
from tests.support.waiting import SCALE, wait_for

START_S = 120.0
CGROUPS = Path("/sys/fs/cgroup")


def why_not(release: str = "") -> str:
    """Return why no node can be run here, empty if one can."""
    return why_no_kubelet(release) or why_no_containerd()


@dataclass
class RealKubelet:
    """A kubelet: its node's name, its address, and its folder; `command` runs it."""

    node: str
    url: str
    folder: Path
    command: Sequence[str]
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def certificate(self) -> Path:
        """The certificate with which it serves."""
        return self.folder / "certificates" / "kubelet.crt"

    @property
    def checkpoint(self) -> Path:
        """The file of its CPU manager."""
        return self.folder / "root" / "cpu_manager_state"

    def said(self) -> str:
        """Return the end of its log."""
        return (self.folder / "kubelet.log").read_text(errors="replace")[-4000:]

    def start(self) -> None:
        """Start it."""
        with (self.folder / "kubelet.log").open("ab") as log:
            process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._processes.append(process)

    def assert_runs(self) -> None:
        """Assert that it has not ended by itself."""
        assert self._processes[-1].poll() is None, self.said()

    def kill(self) -> None:
        """Kill it; its pods live on."""
        while self._processes:
            process = self._processes.pop()
            process.kill()
            process.wait(20 * SCALE)

    def configure(self, **settings: object) -> None:
        """Change fields of its configuration, for its next start."""
        file = self.folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@contextlib.contextmanager
def real_kubelet(
    cluster: ControlPlane,
    containerd: Containerd,
    node: str,
    release: str = "",
    **settings: object,
) -> Iterator[RealKubelet]:
    """Run a kubelet for the block; `settings` are fields of its configuration."""
    folder = containerd.shared / "kubelet"
    for name in ("root", "logs", "plugins", "certificates", "manifests", "kernel"):
        (folder / name).mkdir(parents=True)
    shutil.copy(kubelet_programs(release) / "kubelet", folder / "kubelet")
    name_a_network(containerd.shared / "cni")
    make_cgroups(containerd.cgroup)
    flat = cluster.kubectl("config", "view", "--raw", "--flatten")
    (folder / "kubeconfig").write_text(flat)
    (folder / "kubeconfig").chmod(0o600)
    for name, value in KERNEL.items():
        file = folder / "kernel" / name.replace("/", "-")
        file.write_text(f"{value}\n")
        containerd.run("mount", "--bind", str(file), f"/proc/sys/{name}")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    shutil.copy(cluster.kubelet_client, folder / "client.crt")
    configuration = _configuration(folder, containerd, port) | settings
    (folder / "config.json").write_text(json.dumps(configuration))
    command = containerd.inside(
        *(str(folder / "kubelet"), "--config", str(folder / "config.json")),
        *("--kubeconfig", str(folder / "kubeconfig"), "--root-dir", str(folder / "root")),
        *("--cert-dir", str(folder / "certificates"), "--hostname-override", node),
        *("--cloud-provider", "external", "--v", "2"),  # so that it keeps its address of loopback
    )
    kubelet = RealKubelet(node, f"https://127.0.0.1:{port}", folder, command)
    kubelet.start()

    def ready() -> bool:
        kubelet.assert_runs()
        found = cluster.run("kubectl", "get", "node", node, "-o", "json", check=False)
        if found.returncode:
            return False
        conditions = json.loads(found.stdout)["status"].get("conditions", [])
        return {"Ready": "True"} in [{one["type"]: one["status"]} for one in conditions]

    try:
        try:
            wait_for(ready, f"the kubelet of {node} to be ready", START_S)
        except TimeoutError as error:
            error.add_note(kubelet.said())
            raise
        address = {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]}
        patch = ("patch", "node", node, "--type=merge", "-p")
        cluster.kubectl(*patch, json.dumps({"status": address}), "--subresource=status")
        cluster.kubectl(*patch, json.dumps({"spec": {"taints": []}}))
        yield kubelet
    finally:
        kubelet.kill()


def pod(name: str, node: str, cpus: str, **fields: Any) -> dict[str, Any]:
    """Return a Guaranteed pod of namespace shop with one container; `fields` are of its spec."""
    annotations = fields.pop("annotations", {})
    amount = {"cpu": cpus, "memory": "300Mi"}  # with cgroup v2 QEMU is in the pod's cgroup
    container = {
        "name": "app", "image": IMAGE, "imagePullPolicy": "Never",
        "resources": {"requests": amount, "limits": amount},
    }  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop", "annotations": annotations},
        "spec": {
            "nodeName": node,
            "hostNetwork": True,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [container],
            **fields,
        },
    }


def run_pod(
    kubelet: RealKubelet, cluster: ControlPlane, containerd: Containerd, wanted: dict[str, Any]
) -> tuple[str, str]:
    """Create a pod and wait until it runs; return the ids of its sandbox and its container."""
    name = wanted["metadata"]["name"]
    runtime = {"kind": "RuntimeClass", "metadata": {"name": "kata"}, "handler": "kata"}
    account = {"kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "shop"}}
    cluster.apply(
        {"apiVersion": "node.k8s.io/v1", **runtime}, {"apiVersion": "v1", **account}, wanted
    )

    def running() -> str:
        status = cluster.get("pod", name, "-n", "shop")["status"]
        (container,) = status.get("containerStatuses") or [{}]
        is_running = "running" in container.get("state", {})
        return str(container["containerID"]).rpartition("/")[2] if is_running else ""

    try:
        container = wait_for(running, f"pod {name} to run", 60)
    except TimeoutError as error:
        error.add_note(cluster.kubectl("describe", "pod", name, "-n", "shop"))
        error.add_note(kubelet.said())
        raise
    return containerd.spec(container)["annotations"]["io.kubernetes.cri.sandbox-id"], container


def make_cgroups(name: str) -> None:
    """Make the cgroup above all pods in each hierarchy: a kubelet wants it to be there."""
    if (CGROUPS / "cgroup.controllers").exists():
        made = Path(f"{CGROUPS}{name}")
        made.mkdir()
        for folder in (CGROUPS, made):  # made's own keep systemd from taking them away again
            for controller in (folder / "cgroup.controllers").read_text().split():
                (folder / "cgroup.subtree_control").write_text(f"+{controller}")
        return
    for hierarchy in CGROUPS.iterdir():
        if hierarchy.is_symlink() or not hierarchy.is_dir():
            continue
        made = Path(f"{hierarchy}{name}")
        made.mkdir()
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (made / file).exists() and not (made / file).read_text().strip():
                (made / file).write_text((hierarchy / file).read_text())


def name_a_network(folder: Path) -> None:
    """Write a network's configuration, without which no node is ready; no pod here uses it."""
    (folder / "conf").mkdir(parents=True, exist_ok=True)
    listed = {"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "none"}]}
    (folder / "conf" / "10-none.conflist").write_text(json.dumps(listed))


def _configuration(folder: Path, containerd: Containerd, port: int) -> dict[str, object]:
    """Return what differs from a kubelet that has no API server, no cgroups and nothing to run."""
    order = {"options": {}, "reserved": "", "topology_manager": "none", "scope": "container"}
    return {
        **configuration(folder, order),
        "containerRuntimeEndpoint": f"unix://{containerd.cri_socket}",
        "port": port,
        "readOnlyPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(folder / "client.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupRoot": containerd.cgroup,
        "cgroupsPerQOS": True,
        # What quotas switch in the kernel can make an emulated machine panic.
        "cpuCFSQuota": LAB not in os.environ,
        "runtimeRequestTimeout": f"{120 * SCALE:g}s",
        "syncFrequency": "2s",
        "cpuManagerPolicy": "none",
    }
