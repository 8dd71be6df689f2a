"""Kata's own files: what is read when members are missing, renamed or wrong.

Real files: test_recordings.py.
"""

from __future__ import annotations

import json

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.base.values import ContainerKind, ContainerState, KataRuntime
from kata_pin.peers.kata import (
    PersistedSandbox,
    container_state,
    parse_persist,
    parse_rs_state,
    to_containers,
)

KATA = "io.katacontainers.pkg.oci.container_type"


def persist(*containers: object, **members: object) -> bytes:
    config = {"ContainerConfigs": list(containers)}
    return json.dumps({"SandboxContainer": "s1", "Config": config} | members).encode()


def entry(id: str, kind: str, cpus: str = "") -> dict[str, object]:  # noqa: A002 - Kata's word
    return {"ID": id, "Annotations": {KATA: kind}, "Resources": {"cpu": {"cpus": cpus}}}


def test_empty() -> None:
    """An empty document gives zeros and empty texts."""
    assert parse_persist(b"{}") == PersistedSandbox(KataRuntime.GO)
    assert parse_rs_state(b"{}") == PersistedSandbox(KataRuntime.RUST)


def test_old_name() -> None:
    """Kata 1.x and 2.x called virtiofsd's pid differently."""
    parsed = parse_persist(persist(HypervisorState={"VirtiofsdPid": 5}))
    assert parsed.virtiofsd_pid == 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (persist(HypervisorState={"Pid": -1}), "HypervisorState.Pid: not within"),
        (persist(HypervisorState={"Pid": 1 << 33}), "HypervisorState.Pid: not within"),
        (persist(HypervisorState={"Pid": True}), "HypervisorState.Pid: not an integer"),
        (persist(entry("../x", "pod_container")), "ContainerConfigs: not a valid container id"),
        (persist(*[{}] * 2000), "ContainerConfigs: more than 1024"),
        (persist()[:-5], "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_wrong(data: bytes, message: str) -> None:
    """A member that is wrong, or a file that is half written, is a ParseError."""
    with pytest.raises(ParseError, match=f"persist.json: .*{message}"):
        parse_persist(data)


@pytest.mark.parametrize("count", [1, 5000])
def test_foreign_annotations_hide_nothing(count: int) -> None:
    """What a pod's author writes into annotations, and how often, leaves the containers seen."""
    one = entry("c1", "pod_container", "3")
    foreign = {f"example.com/{number}": "," * (200_001 // count) for number in range(count)}
    one["Annotations"] = {**foreign, KATA: "pod_container"}
    one["Resources"] = {"cpu": {"cpus": "3", "shares": (1 << 64) - 1}}
    (found,) = parse_persist(persist(one)).containers
    assert found.annotations == {KATA: "pod_container"}
    assert (found.cpu.cpus, found.cpu.shares) == ("3", (1 << 63) - 1)


def test_a_pod_of_kata_1() -> None:
    """With Kata's marks only, the sandbox of the file counts, and the pause container is known."""
    sandbox = parse_persist(persist(entry("s1", "pod_sandbox"), entry("c1", "pod_container", "3")))
    pause, app = to_containers(sandbox, states={"c1": ContainerState.STOPPED}, stamp_ns=7)
    assert (pause.kind, pause.sandbox_id, pause.state) == (
        ContainerKind.SANDBOX,
        "s1",
        ContainerState.RUNNING,
    )
    assert (app.kind, app.sandbox_id, app.state) == (
        ContainerKind.CONTAINER,
        "s1",
        ContainerState.STOPPED,
    )
    assert (app.cpus, app.source, app.recorded_ns) == (CpuSet([3]), "adopted", 7)


def test_a_container_alone() -> None:
    """The same mark on a container that is alone is the workload itself."""
    (alone,) = to_containers(parse_persist(persist(entry("s1", "pod_sandbox", "1"))))
    assert (alone.kind, alone.sandbox_id) == (ContainerKind.CONTAINER, "s1")


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("ready", ContainerState.CREATED),
        ("running", ContainerState.RUNNING),
        ("paused", ContainerState.RUNNING),
        ("stopped", ContainerState.STOPPED),
        ("", ContainerState.CREATED),
    ],
)
def test_container_state(word: str, state: ContainerState) -> None:
    """Kata's words for a container's state (virtcontainers/types)."""
    assert container_state(json.dumps({"State": word}).encode()) == state


def test_runtime_rs() -> None:
    """What runtime-rs saves for QEMU: no pids, and its own pinning."""
    document = {
        "sandbox_type": "virt_container",
        "resource": {
            "endpoint": [],
            "cgroup_state": {
                "path": "/kubepods/pod1/kata_s1",
                "overhead_path": None,
                "sandbox_cgroup_only": True,
                "enable_vcpus_pinning": True,
            },
        },
        "hypervisor": {
            "hypervisor_type": "qemu",
            "pid": None,
            "id": "s1",
            "config": {"path": "/opt/kata/bin/qemu-system-x86_64"},
            "virtiofs_daemon_pid": 0,
        },
    }
    assert parse_rs_state(json.dumps(document).encode()) == PersistedSandbox(
        runtime=KataRuntime.RUST,
        sandbox_id="s1",
        vcpu_pinning=True,
    )
