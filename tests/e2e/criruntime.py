"""containerd of this machine with Kata's place taken by minikata: a handler with our base spec.

    with kata_handler(node) as containerd:
        pod = containerd.cri.run_pod("p1", "kata")

The base runtime spec is made as hooks/README.md says: `ctr oci spec` with the installed fragment
merged into it. The pause image is made on the spot. At the end pods are removed, containerd has its
own configuration again, and everything of minikata is purged.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from tests.e2e.node import Node
from tests.e2e.nodepods import HERE, installed_hooks
from tests.support import qemu
from tests.support.cri import Cri
from tests.support.minikata import PROGRAM
from tests.support.pauseimage import IMAGE, pause_archive

HANDLER: Final = "kata"
SOCKET: Final = Path("/run/containerd/containerd.sock")
CGROUP: Final = "/kata-pin-e2e-cri"
ROOT: Final = Path("/run/minikata")
BASE_SPEC: Final = Path("/etc/containerd/kata-base-spec.json")
SETTINGS: Final = Path("/etc/minikata.json")
HOLD: Final = Path("/run/kata-pin-e2e-hold")
"""While this is there, createRuntime of containers does not end: the workload does not run yet."""
_CONFIG: Final = Path("/etc/containerd/config.toml")
_BASE: Final = f'  base_runtime_spec = "{BASE_SPEC}"\n'
_HANDLER: Final = f"""
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{HANDLER}]
  runtime_type = "io.containerd.runc.v2"
  pod_annotations = ["io.katacontainers.*", "minikata.*"]
{_BASE}  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{HANDLER}.options]
    BinaryName = "{PROGRAM}"
    Root = "{ROOT}"
"""
"""containerd's runc shim adds the namespace to Root: the state is in ROOT/k8s.io."""


@dataclass
class CriNode:
    """The running containerd: its client, and what was made with it."""

    node: Node
    cri: Cri
    pods: list[str] = field(default_factory=list)

    def run_pod(self, name: str, handler: str = HANDLER, **annotations: str) -> str:
        """Start a pod; it is removed at the end."""
        pod = self.cri.run_pod(name, handler, annotations)
        self.pods.append(pod)
        return pod

    def create(self, pod: str, pod_name: str, name: str, **resources: Any) -> str:
        """Create and start a container with fields of LinuxContainerResources."""
        container = self.cri.create(pod, name, pod_name=pod_name, **resources)
        self.cri.start(container)
        return container

    def restart(self) -> None:
        """Restart containerd; its shims and pods live on."""
        self.node.run(["systemctl", "restart", "containerd"], seconds=60)
        self.wait()

    def wait(self) -> None:
        """Wait until the CRI plugin serves."""
        self.node.wait(self.cri.answers, "containerd to serve", seconds=60)

    def remove_all(self) -> None:
        """Remove every pod that is left."""
        for pod in self.pods:
            with contextlib.suppress(grpc.RpcError):
                self.cri.stop_pod(pod)
                self.cri.remove_pod(pod)
        self.pods.clear()


def _hooks() -> dict[str, Any]:
    """Return the installed hooks, and after ours in createRuntime one that waits for the test."""
    hooks = installed_hooks()
    waiting = f"while [ -e {HOLD} ]; do sleep 0.1; done"
    hooks["createRuntime"].append({"path": "/bin/sh", "args": ["sh", "-c", waiting]})
    return hooks


def _name(handler: str) -> str:
    """Return the line of containerd's configuration that names the default runtime."""
    return f'default_runtime_name = "{handler}"\n'


def qemu_pid(sandbox: str) -> int:
    """Return the pid of a sandbox's QEMU, from Kata's pid file."""
    return int((HERE.vc / "vm" / sandbox / "pid").read_text())


@contextlib.contextmanager
def kata_handler(
    node: Node, folder: Path, *, default: bool = False, hooks: bool = True, **settings: Any
) -> Iterator[CriNode]:
    """Give containerd the handler, without `hooks` no base spec; `settings` are minikata's.

    With `default` it is used for pods that name none, as those of a kubelet without an API server.
    """
    plain = _HANDLER.replace(_BASE, "")
    before = _CONFIG.read_text().replace(_HANDLER, "")  # of a run that was broken off
    before = before.replace(plain, "")
    before = before.replace(_name(HANDLER), _name("runc"))
    named = HANDLER if default else "runc"
    Path("/etc/resolv.conf").touch()  # the CRI plugin copies it into each pod
    (folder / "pause.tar").write_bytes(pause_archive(Path("/usr/bin/busybox")))
    SETTINGS.write_text(
        json.dumps({"scale": node.scale, "firmware": str(qemu.firmware()), **settings})
    )
    spec = json.loads(node.run(["ctr", "oci", "spec"], seconds=60))
    BASE_SPEC.write_text(json.dumps({**spec, "hooks": _hooks()}))
    _CONFIG.write_text(before.replace(_name("runc"), _name(named)) + (_HANDLER if hooks else plain))
    made = CriNode(node, Cri(SOCKET, IMAGE, CGROUP))
    try:
        made.restart()
        importing = ("images", "import", "--snapshotter", "native", str(folder / "pause.tar"))
        node.run(["ctr", "--namespace", "k8s.io", *importing], seconds=60)
        yield made
    finally:
        made.remove_all()
        made.cri.close()
        _CONFIG.write_text(before)
        node.run(["systemctl", "restart", "containerd"], seconds=60)
        node.run([str(PROGRAM), "--root", str(ROOT / "k8s.io"), "purge"], seconds=60)
        for file in (BASE_SPEC, SETTINGS, HOLD):
            file.unlink(missing_ok=True)
