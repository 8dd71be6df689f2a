"""Asking the kubelet over its sockets, and what doctor makes of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kata_pin.base.allocation import POLICY_KEY
from kata_pin.base.config.tree import Config, Paths
from kata_pin.base.errors import ParseError, StateError
from kata_pin.cli.doctor import install
from kata_pin.peers import cri
from kata_pin.peers.kubelet.pods import (
    ALLOCATABLE,
    LIST_PODS,
    LIST_RESOURCES,
    PodsApi,
    read_pod_resources,
)
from kata_pin.peers.proto import kubelet_pb2 as pb
from tests.support.checkpoint import checkpoint
from tests.support.grpcserver import GrpcServer


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kl"))
    yield path
    shutil.rmtree(path)


def pod(uid: str, **annotations: str) -> bytes:
    """Return a v1.Pod as the API sends it, with fields that nobody here knows."""
    message = pb.Pod(
        metadata=pb.ObjectMeta(uid=uid, annotations={POLICY_KEY: "share", **annotations}),
        spec=pb.PodSpec(
            init_containers=[
                pb.Container(name="i1"),
                pb.Container(name="side", restart_policy="Always"),
            ]
        ),
    )
    return bytes(message.SerializeToString()) + b"\x1a\x03\x0a\x01x"  # a status


async def test_pods_with_their_annotations(folder: Path) -> None:
    """By uid; a pod that cannot be read hides no other one."""
    level = pb.Pod(metadata=pb.ObjectMeta(uid="u2"))
    level.spec.resources.limits["cpu"].CopyFrom(pb.Quantity())
    listed = pb.ListPodsResponse(
        pods=[pod("u1", other="x"), b"\xff", pod("../u"), level.SerializeToString()]
    )
    with GrpcServer(folder / "s", {LIST_PODS: listed.SerializeToString()}):
        found = await PodsApi(str(folder / "s")).read()
    assert set(found) == {"u1", "u2"}
    assert dict(found["u1"].annotations) == {POLICY_KEY: "share"}
    assert found["u1"].inits == {"i1"}
    assert (found["u1"].pod_level, found["u2"].pod_level) == (False, True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((grpc.StatusCode.FAILED_PRECONDITION, "not synced"), "not synced .*is starting"),
        ((grpc.StatusCode.PERMISSION_DENIED, "no"), "refused /v1alpha1.Pods/ListPods: no"),
        (None, "from Kubernetes 1.37 on"),
    ],
)
async def test_a_kubelet_that_does_not_answer(
    folder: Path, answer: tuple[object, str] | None, said: str
) -> None:
    """Its reason, and what to do about it."""
    with (
        GrpcServer(folder / "s", {} if answer is None else {LIST_PODS: answer}),
        pytest.raises(StateError, match=said),
    ):
        await PodsApi(str(folder / "s")).read()


async def test_no_kubelet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket, another kind of file, and no library."""
    with pytest.raises(StateError, match="No such file"):
        await PodsApi(str(folder / "s")).read()
    (folder / "s").touch()
    with pytest.raises(StateError, match="not a socket"):
        await PodsApi(str(folder / "s")).read()
    (folder / "s").unlink()
    monkeypatch.setattr(cri, "LIBRARY", "grpc_is_not_here")
    for remedy in ("pip install", "scripts/image --cri"):
        missing = pytest.raises(StateError, match=f"grpcio is not installed: .*{remedy}")
        with GrpcServer(folder / "s", {}), missing:
            await PodsApi(str(folder / "s")).read()
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")


def resources(*cpus: int, pods: int = 1) -> bytes:
    """Return a list in which each pod has one container with exclusive CPUs and one without."""
    containers = [
        pb.ContainerResources(name="c", cpu_ids=cpus),
        pb.ContainerResources(name="shared"),
    ]
    each = [
        pb.PodResources(name=f"p{number}", namespace="shop", containers=containers)
        for number in range(pods)
    ]
    return bytes(pb.ListPodResourcesResponse(pod_resources=each).SerializeToString())


def allocatable(*cpus: int) -> bytes:
    """Return the other answer."""
    return bytes(pb.AllocatableResourcesResponse(cpu_ids=cpus).SerializeToString())


async def test_pod_resources(folder: Path) -> None:
    """Exclusive CPUs by container, and what may be given; numbers are checked."""
    answers: dict[str, bytes] = {LIST_RESOURCES: resources(2, 3), ALLOCATABLE: allocatable(1, 2, 3)}
    with GrpcServer(folder / "s", {**answers}):
        found = await read_pod_resources(str(folder / "s"))
    assert {name: str(cpus) for name, cpus in found.containers.items()} == {"shop/p0/c": "2-3"}
    assert str(found.allocatable) == "1-3"
    for wrong in (resources(-1), resources(1 << 40), resources(1, pods=5000), b"\xff"):
        with (
            GrpcServer(folder / "w", {**answers, LIST_RESOURCES: wrong}),
            pytest.raises(ParseError),
        ):
            await read_pod_resources(str(folder / "w"))


def test_doctor_compares_with_the_checkpoint(folder: Path) -> None:
    """What only the list has is named; without the socket or the static policy nothing is said."""
    state = folder / "cpu_manager_state"
    config = Config(paths=Paths(kubelet_state=str(state)))
    socket = folder / "pod-resources" / "kubelet.sock"
    socket.parent.mkdir()
    state.write_text(checkpoint("0-1,4-7", {"u": {"c": "2-3"}}))
    assert list(install.pod_resources(config)) == []
    answers = {LIST_RESOURCES: resources(2, 3), ALLOCATABLE: allocatable(*range(1, 8))}
    server = GrpcServer(socket, {**answers})
    with server:
        (row,) = install.pod_resources(config)
        assert (row.status, row.text) == (
            "ok", "as the checkpoint; 5 of 7 allocatable pCPUs are free",
        )  # fmt: skip
        server.answers[LIST_RESOURCES] = resources(4)
        (row,) = install.pod_resources(config)
        assert (row.status, "shop/p0/c has 4" in row.text) == ("warn", True)
        server.answers[LIST_RESOURCES] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too often")
        (row,) = install.pod_resources(config)
        assert (row.status, "too often" in row.text) == ("info", True)
