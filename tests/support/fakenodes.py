"""Nodes without machines: kwok plays the kubelets (leases, heartbeats, pods that become ready).

    with kwok(cluster):
        await fake_nodes(cluster, 50, pods=5)

scripts/kwok builds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kata_pin.peers.http import HttpAnswer, HttpClient
from tests.support.controlplane import ControlPlane, running

PROJECT = Path(__file__).resolve().parents[2]
NAME: Final = "fake-{}"
_FAKE: Final = {"kwok.x-k8s.io/node": "fake"}
_LEASE_S: Final = 40
"""The kubelet's default; renewed four times as often."""


def _programs() -> Path:
    command = [str(PROJECT / "scripts" / "kwok"), "--where"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


NEEDS_KWOK = pytest.mark.skipif(
    not (_programs() / "kwok").exists(), reason="no kwok here: scripts/kwok builds it where Go is"
)


@contextlib.contextmanager
def kwok(cluster: ControlPlane) -> Iterator[None]:
    """Play the kubelets of fake nodes for the block."""
    command = [
        *(str(_programs() / "kwok"), "--kubeconfig", str(cluster.folder / "kubeconfig")),
        *("--config", str(_programs() / "stages.yaml"), "--manage-all-nodes=false"),
        *("--manage-nodes-with-annotation-selector", "=".join(*_FAKE.items())),
        *("--node-lease-duration-seconds", str(_LEASE_S), "--node-ip", "127.0.0.1"),
    ]
    with running(command, cluster.folder / "kwok.log"):
        yield


class Administrator:
    """Requests with all rights, many at a time."""

    def __init__(self, cluster: ControlPlane, at_once: int = 8) -> None:
        self._url, self._ca = cluster.url, str(cluster.ca)
        self._token = cluster.folder / "admin.token"
        known = json.loads((cluster.folder / "kubeconfig").read_text())
        self._token.write_text(known["users"][0]["user"]["token"])
        self._limit = asyncio.Semaphore(at_once)

    async def ask(self, method: str, path: str, given: Any = None) -> bytes:
        """Return what the API server answers, which must be a success."""
        client = HttpClient(self._url, token=str(self._token), ca=self._ca, deadline_s=60.0)
        body = None if given is None else json.dumps(given).encode()
        kind = "" if given is None else "application/json"
        async with self._limit:
            answer: HttpAnswer = await client.ask(
                method, path, HttpClient.whole, body=body, kind=kind
            )
        assert answer.status in {200, 201}, (path, answer.status, bytes(answer.body)[:500])
        return bytes(answer.body)


async def fake_nodes(admin: Administrator, count: int, *, pods: int) -> list[str]:
    """Make nodes that run Kata, with so many pods of namespace shop each; return their names."""
    names = [NAME.format(number) for number in range(count)]
    await together(admin.ask, (("POST", "/api/v1/nodes", _node(name)) for name in names))
    path = "/api/v1/namespaces/shop/pods"
    every = ((name, number) for name in names for number in range(pods))
    await together(admin.ask, (("POST", path, _pod(*one)) for one in every))
    return names


async def together(do: Callable[..., Awaitable[Any]], every: Iterable[tuple[Any, ...]]) -> None:
    """Call for each, all at once."""
    await asyncio.gather(*(do(*one) for one in every))


def _node(name: str) -> dict[str, Any]:
    labels = {"katacontainers.io/kata-runtime": "true", "kubernetes.io/hostname": name}
    return {
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": _FAKE},
        "status": {"capacity": {"cpu": "64", "memory": "256Gi", "pods": "110"}},
    }  # fmt: skip


def _pod(node: str, number: int) -> dict[str, Any]:
    container = {"name": "app", "image": "example/app", "resources": {"requests": {"cpu": "1"}}}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": f"{node}-{number}", "namespace": "shop"},
        "spec": {
            "nodeName": node, "containers": [container], "automountServiceAccountToken": False,
            "tolerations": [{"operator": "Exists"}],
        },
    }  # fmt: skip
