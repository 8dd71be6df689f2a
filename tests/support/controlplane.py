"""A real etcd and kube-apiserver on loopback, with kubectl and helm: what scripts/cluster builds.

    with control_plane(folder) as cluster:
        cluster.kubectl("get", "nodes")

Without `controllers(cluster)` nothing but the API server changes an object. Pods in the host's
network reach the API server where Kubernetes tells them, because the addresses of services are
loopback's. Programs are ended by pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import certificate
from tests.support.waiting import SCALE, wait_for

PROJECT = Path(__file__).resolve().parents[2]
START_S = 120.0
_CONTROLLERS = (
    "daemonset-controller",
    "garbage-collector-controller",
    "job-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "taint-eviction-controller",
    "node-lifecycle-controller",
)


def programs() -> Path:
    """Return the folder of the programs, built or not."""
    command = [str(PROJECT / "scripts" / "cluster"), "--where"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


NEEDS_CLUSTER = pytest.mark.skipif(
    not (programs() / "cluster").exists(),
    reason="no control plane here: scripts/cluster builds it where Go is",
)


@dataclass(frozen=True)
class ControlPlane:
    """A running API server: the folder of its files, its address, its own certificate, and the
    certificate by which kubelets know it."""

    folder: Path
    url: str
    ca: Path
    kubelet_client: Path

    def run(
        self, program: str, *arguments: str, check: bool = True, given: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl or helm as the cluster's administrator; `given` is its standard input."""
        done = subprocess.run(
            [str(programs() / program), *arguments],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=120 * SCALE,
            env=self.environment,
        )
        assert not check or done.returncode == 0, f"{program} {arguments}: {done.stderr}"
        return done

    def kubectl(self, *arguments: str, given: str | None = None, check: bool = True) -> str:
        """Return what kubectl prints; without `check` also what it complains of."""
        done = self.run("kubectl", *arguments, given=given, check=check)
        return done.stdout if check else done.stdout + done.stderr

    def apply(self, *objects: dict[str, Any]) -> None:
        """Apply objects, server-side."""
        documents = "\n---\n".join(map(json.dumps, objects))
        self.kubectl("apply", "--server-side", "-f", "-", given=documents)

    def get(self, *what: str) -> Any:
        """Return an object, or a list."""
        return json.loads(self.kubectl("get", *what, "-o", "json"))

    @property
    def environment(self) -> dict[str, str]:
        """What kubectl and helm need: the cluster's address, and folders of their own."""
        return {
            "PATH": f"{programs()}:{os.environ['PATH']}",
            "KUBECONFIG": str(self.folder / "kubeconfig"),
            "HOME": str(self.folder),
        }

    def node(self, name: str) -> str:
        """Make a Node; return its uid."""
        self.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        uid: str = self.get("node", name)["metadata"]["uid"]
        return uid

    def token(self, account: str, namespace: str, pod: str) -> str:
        """Return a token of a service account that is bound to a pod, and so to its node."""
        return self.kubectl(
            *("create", "token", account, "-n", namespace, "--duration", "1h"),
            *("--bound-object-kind", "Pod", "--bound-object-name", pod),
        ).strip()


@contextlib.contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """Run etcd and the API server for the block."""
    client, peer = _free_ports(2)
    services = f"127.{64 + os.getpid() % 128}"  # the API server's own service has the first one
    key = folder / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    told, secret = certificate(
        folder, "DNS:apiserver", "-subj", "/O=system:masters/CN=apiserver",
        "-addext", "extendedKeyUsage=clientAuth",
    )  # fmt: skip
    admin = secrets.token_hex(16)
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{admin},admin,admin,"system:masters"\n')
    tokens.chmod(0o600)
    url, store = f"https://{services}.0.1:443", f"http://127.0.0.1:{client}"
    etcd = [
        *(str(programs() / "etcd"), "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
        *("--listen-client-urls", store, "--advertise-client-urls", store),
        *("--listen-peer-urls", f"http://127.0.0.1:{peer}", "--log-level", "error"),
    ]
    apiserver = [
        *(str(programs() / "kube-apiserver"), "--etcd-servers", store),
        *("--secure-port", "443", "--bind-address", f"{services}.0.1"),
        *("--advertise-address", f"{services}.0.1"),  # else it looks for a default route
        *("--cert-dir", str(folder / "certificates"), "--authorization-mode", "RBAC"),
        *("--token-auth-file", str(tokens), "--service-cluster-ip-range", f"{services}.0.0/16"),
        *("--service-account-issuer", url, "--service-account-key-file", str(key)),
        *("--service-account-signing-key-file", str(key), "--allow-privileged=true"),
        *("--endpoint-reconciler-type", "none", "--feature-gates", "MutatingAdmissionPolicy=true"),
        *("--runtime-config", "admissionregistration.k8s.io/v1beta1=true"),
        *("--kubelet-client-certificate", str(told), "--kubelet-client-key", str(secret)),
    ]
    ca = folder / "certificates" / "apiserver.crt"
    with running(etcd, folder / "etcd.log"), running(apiserver, folder / "apiserver.log") as api:
        wait_for(lambda: _ready(url, admin, api, folder), "the API server to be ready", START_S)
        cluster = ControlPlane(folder, url, ca, told)
        _write_kubeconfig(folder / "kubeconfig", url, ca, admin)
        _wait_for_admission(cluster)
        yield cluster


@contextlib.contextmanager
def controllers(cluster: ControlPlane) -> Iterator[None]:
    """Run the scheduler and the controllers that DaemonSets and their pods need."""
    folder = cluster.folder
    common = [
        *("--kubeconfig", str(folder / "kubeconfig"), "--leader-elect=false"),
        *("--bind-address", "127.0.0.1", "--cert-dir", str(folder / "certificates")),
    ]
    first, second = _free_ports(2)
    manager = [
        *(str(programs() / "kube-controller-manager"), *common, "--secure-port", str(first)),
        *("--service-account-private-key-file", str(folder / "service-accounts.key")),
        *("--root-ca-file", str(cluster.ca), "--controllers", ",".join(_CONTROLLERS)),
    ]
    scheduler = [str(programs() / "kube-scheduler"), *common, "--secure-port", str(second)]
    with running(manager, folder / "manager.log"), running(scheduler, folder / "scheduler.log"):
        yield


def _wait_for_admission(cluster: ControlPlane) -> None:
    """Wait for the namespaces that the API server makes, and for its own service accounts."""
    wait_for(
        lambda: cluster.run("kubectl", "get", "namespace", "default", check=False).returncode == 0,
        "namespace default",
        START_S,
    )


def _write_kubeconfig(path: Path, url: str, ca: Path, token: str) -> None:
    named = {"name": "test"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [named | {"cluster": {"server": url, "certificate-authority": str(ca)}}],
        "users": [named | {"user": {"token": token}}],
        "contexts": [named | {"context": {"cluster": "test", "user": "test"}}],
    }
    path.write_text(json.dumps(document))
    path.chmod(0o600)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program for the block; it is ended by its pid."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["nice", "-n", "5", *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20 * SCALE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(url: str, token: str, process: subprocess.Popen[bytes], folder: Path) -> bool:
    assert process.poll() is None, (folder / "apiserver.log").read_text()[-3000:]
    asked = urllib.request.Request(f"{url}/readyz", headers={"Authorization": f"Bearer {token}"})
    try:
        context = ssl.create_default_context(cafile=str(folder / "certificates/apiserver.crt"))
        with urllib.request.urlopen(asked, timeout=5 * SCALE, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody had a moment ago, each another one."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
