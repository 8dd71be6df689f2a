"""The real kubelet in a lab machine: standalone, CPU manager `static`, this machine's containerd.

    with RealKubelet(node, folder, "cgroupfs") as kubelet:
        kubelet.add("a", cpus=2)
        node.wait(lambda: kubelet.is_running("a"), "a")

`scripts/lab test --with-kubelet` puts the program into the machine. There is no API server: pods
are manifests in a folder, so they have no runtime class (containerd's default runtime serves them),
and they use the host's network. CFS quotas are off: what they switch in the kernel can make an
emulated machine panic.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kata_pin.base.cpuset import CpuSet
from tests.e2e.criruntime import SOCKET
from tests.e2e.node import Node
from tests.kubelet.recording import programs
from tests.support.pauseimage import IMAGE

PROGRAM: Final = programs() / "kubelet"
ROOT: Final = Path("/var/lib/kubelet")
CHECKPOINT: Final = ROOT / "cpu_manager_state"
NAMESPACE: Final = "shop"
CONTAINER: Final = "app"
RESERVED: Final = "0"
RECONCILE_S: Final = 60
"""Between two times at which the kubelet writes the cpusets of running containers."""

START_S: Final = 60.0
ASK_S: Final = 3.0
_PORT: Final = 10255


class RealKubelet:
    """A kubelet process and its folder of manifests; `log` is what it wrote."""

    def __init__(self, node: Node, folder: Path, driver: str) -> None:
        """`driver` names its pods' cgroups: cgroupfs or systemd."""
        self._node = node
        self._manifests = folder / "manifests"
        self._manifests.mkdir(parents=True)
        for name in ("logs", "plugins", "certificates"):
            (folder / name).mkdir()
        self.log = node.results_folder() / "kubelet.log"
        config = folder / "kubelet.json"
        config.write_text(json.dumps(_configuration(folder, driver)))
        self._command = [
            *(str(PROGRAM), "--config", str(config), "--root-dir", str(ROOT)),
            *("--cert-dir", str(folder / "certificates"), "--hostname-override", "node"),
            *("--node-ip", "127.0.0.1", "--v", "2"),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: tuple[float, dict[str, dict[str, Any]]] = (0.0, {})

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it; it serves when `serves` says so."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill it; its pods live on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wait_serving(self) -> None:
        """Wait until it lists its pods and has a checkpoint."""
        self._node.wait(self._serves, "the kubelet to serve", START_S)

    def _serves(self) -> bool:
        assert self._process is not None, "it was not started"
        status = self._process.poll()
        assert status is None, f"the kubelet ended with {status}: {self._said()}"
        return self.pods() is not None and CHECKPOINT.exists()

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    # ---- pods ----------------------------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        cpus: int = 0,
        command: Sequence[str] = (),
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Have it run a pod with one container; with `cpus` it is Guaranteed and gets so many."""
        file = self._manifests / f"{name}.json"
        written = file.with_name(f".{file.name}")
        written.write_text(json.dumps(_manifest(name, cpus, command, annotations or {})))
        written.rename(file)

    def remove(self, name: str) -> None:
        """Have it end a pod."""
        (self._manifests / f"{name}.json").unlink()

    def pods(self) -> dict[str, dict[str, Any]] | None:
        """Return the status of each of its pods, by name; None while it serves nothing."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{_PORT}/pods", timeout=10 * self._node.scale
            ) as reply:
                listed = json.load(reply).get("items") or []
        except OSError:
            return None
        suffix = "-node"  # a static pod is named after its node too
        return {one["metadata"]["name"].removesuffix(suffix): one["status"] for one in listed}

    def container(self, name: str) -> dict[str, Any]:
        """Return the status of a pod's container, nothing where the kubelet has none yet.

        It is asked every ASK_S at most: each answer takes it long here.
        """
        if time.monotonic() - self._asked[0] > ASK_S:
            self._asked = time.monotonic(), self.pods() or {}
        status = self._asked[1].get(name, {})
        return next(iter(status.get("containerStatuses") or ()), {})

    def is_running(self, name: str) -> bool:
        """Whether a pod's container runs, as the kubelet says."""
        return "running" in self.container(name).get("state", {})

    def restarts(self, name: str) -> int:
        """Return how often a pod's container was made again."""
        return int(self.container(name).get("restartCount", 0))


def uid_of(name: str) -> str:
    """Return the uid of the pod of that name."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, name))


def read_checkpoint() -> tuple[CpuSet, dict[str, CpuSet]]:
    """Return the kubelet's default set, and by pod uid what each has exclusively.

    Nothing of both where there is no checkpoint, or half of one.
    """
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(CHECKPOINT.read_text())
        held = {
            uid: CpuSet.parse(",".join(containers.values()))
            for uid, containers in (document.get("entries") or {}).items()
        }
        return CpuSet.parse(document["defaultCpuSet"]), held
    return CpuSet(), {}


def forget_state() -> None:
    """Remove what an earlier kubelet of this machine left."""
    for name in ("cpu_manager_state", "memory_manager_state", "allocated_pods_state"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(ROOT / name)


def _configuration(folder: Path, driver: str) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "staticPodPath": str(folder / "manifests"),
        "podLogsDir": str(folder / "logs"),
        "volumePluginDir": str(folder / "plugins"),
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "address": "127.0.0.1",
        "readOnlyPort": _PORT,
        "healthzPort": 0,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": driver,
        "cpuCFSQuota": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "makeIPTablesUtilChains": False,
        "resolvConf": "",
        "maxPods": 20,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "10Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        "fileCheckFrequency": "1s",
        "runtimeRequestTimeout": "10m",
        "cpuManagerPolicy": "static",
        "cpuManagerReconcilePeriod": f"{RECONCILE_S}s",
        "reservedSystemCPUs": RESERVED,
    }


def _manifest(
    name: str, cpus: int, command: Sequence[str], annotations: Mapping[str, str]
) -> dict[str, Any]:
    # The limit is that of the pod's cgroup, with QEMU in it.
    amounts = {"cpu": str(cpus) if cpus else "100m", "memory": "300Mi"}
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "resources": {"requests": amounts, **({"limits": amounts} if cpus else {})},
    }
    if command:
        container["command"] = list(command)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": uid_of(name),
            "annotations": dict(annotations),
        },
        "spec": {
            "hostNetwork": True,
            "dnsPolicy": "Default",
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "restartPolicy": "Always",
            "containers": [container],
        },
    }
