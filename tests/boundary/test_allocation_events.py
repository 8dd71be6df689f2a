"""Events of a runtime in an order that is not the usual one, and what the kubelet's list adds.

The host has 8 CPUs. A pod's container is `c-<pod>`, unless a test names it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.boundary.host import cpu_numbers
from tests.boundary.node import Node
from tests.boundary.runtime import CLASS, FAIL, ContainerRuntime, Refused, runtime_of
from tests.support.checkpoint import replace
from tests.support.kubeletpods import Kubelet, playing_kubelet
from tests.support.nriruntime import pb

BY_PODS = 3
"""Pods that have to show another plugin before kata-pin stops deciding."""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, sysfs=8)


@pytest.fixture
async def runtime(node: Node) -> AsyncIterator[ContainerRuntime]:
    async with runtime_of(node) as one:
        yield one


async def _allocation(node: Node) -> dict[str, Any]:
    shown: dict[str, Any] = (await node.ask("state"))["allocation"]
    return shown


async def _exclusive(node: Node) -> set[int]:
    return cpu_numbers((await _allocation(node))["pools"]["exclusive"])


async def test_a_cpuset_from_before_is_no_conflict(runtime: ContainerRuntime, node: Node) -> None:
    """A next try that comes with a cpuset is no evidence of a later plugin."""
    for number in range(BY_PODS):
        namespace = f"n{number}"
        pod = runtime.pod(f"db{number}", "exclusive", kata=False, namespace=namespace)
        own = await runtime.create(pod, 1)
        await runtime.stop(f"c-db{number}")
        await runtime.make(pod, 1, f"c-db{number}-2", cpus=own)
    assert (await _allocation(node))["suspended"] == ""


async def test_who_starts_alone_waits_for_those_who_leave(
    runtime: ContainerRuntime, node: Node
) -> None:
    """A start on exclusive CPUs is answered after the passes over the sandboxes that had them."""
    others = [runtime.pod(f"web{number}") for number in range(8)]
    for pod in others:
        await runtime.run(pod)
    for pod in others:
        await node.placed(node.vms[pod], main="0-7")
    own = cpu_numbers(await runtime.run(runtime.pod("db", "exclusive", kata=False), 2))
    assert not any(cpu_numbers(node.vms[pod].masks["main"]) & own for pod in others)


async def test_who_is_made_meanwhile_gets_all_its_cpus(
    runtime: ContainerRuntime, node: Node
) -> None:
    """A container that is made while CPUs are held back has them in its cpuset: it starts later."""
    had = cpu_numbers(await runtime.run(runtime.pod("db", "exclusive"), 4))
    vm = node.vms["db"]
    node.kernel.refuse[vm.pid] = errno.EPERM
    await runtime.resize("c-db", 1)
    held = had - await _exclusive(node)
    assert len(held) == 3
    web = await runtime.make(runtime.pod("web", kata=False))
    assert not cpu_numbers(web) & held
    own = cpu_numbers(await runtime.make(runtime.pod("new", "exclusive", kata=False), 5))
    assert (len(own), bool(own & held)) == (5, True)


async def test_a_record_before_synchronize(runtime: ContainerRuntime, node: Node) -> None:
    """A container first reported by Kata's hook has its annotation once the runtime reports it."""
    runtime.disconnect()
    pod = runtime.pod("db", "exclusive")
    await node.create(node.vms["db"], "c-db")
    runtime.there(pod, 1, "")
    await runtime.connect()
    assert len(await _exclusive(node)) == 1


async def test_synchronize_leaves_other_runtimes_sandboxes(node: Node) -> None:
    """A sandbox that this runtime does not list keeps what it has."""
    async with runtime_of(node, orders=str(node.folder / "orders")) as runtime:
        pod = runtime.pod("db")
        await runtime.run(pod, 1)
        replace(node.folder / "orders", "shop/db exclusive\n")
        while not (had := await _exclusive(node)):
            await node.pause()
        runtime.disconnect()
        del runtime.pods[pod], runtime.containers["c-db"]
        runtime.there(runtime.pod("web", kata=False), 1, "0-7")
        await runtime.connect()
        assert await _exclusive(node) == had
        assert not cpu_numbers(runtime.cpus["c-web"]) & had


async def test_an_end_that_is_not_stored(runtime: ContainerRuntime, node: Node) -> None:
    """The connection ends; by the next one it is known, and everything is released."""
    await runtime.make(runtime.pod("web", kata=False))
    await runtime.make(runtime.pod("db", "exclusive", kata=False), 2)
    with node.registry_refuses():
        await runtime.stop("c-db")
        assert len(await _exclusive(node)) == 2
    del runtime.containers["c-db"], runtime.pods["db"]
    await runtime.connect()
    assert await _exclusive(node) == set()
    assert runtime.cpus["c-web"] == "0-7"


async def test_a_refused_creation_keeps_what_the_host_became(
    runtime: ContainerRuntime, node: Node
) -> None:
    """CPUs that went off are noticed once: a refusal in the same moment does not undo that."""
    node.host.set_online("0-3")
    pod = runtime.pod("greedy", "exclusive", annotations={FAIL: "strict"})
    with pytest.raises(Refused):
        await runtime.create(pod, 64)
    assert (await _allocation(node))["pools"]["shared"] == "0-3"


async def test_a_container_of_the_pool_takes_no_cpus_from_its_pod(
    runtime: ContainerRuntime, node: Node
) -> None:
    """Where nobody lists pods, one without CPUs of its own may be there before a restart ends."""
    pod = runtime.pod("db", "exclusive")
    own = await runtime.run(pod, 2)
    await runtime.stop("c-db")
    await runtime.run(pod, 0, "c-log", app="log")
    assert await _exclusive(node) == cpu_numbers(own)
    assert await runtime.run(pod, 2, "c-db-1") == own


DISK = "sys/devices/pci0000:3a/0000:3b:00.0"


@pytest.fixture
def sockets(tmp_path: Path) -> Node:
    """A node of two sockets, with a disk at the second one."""
    node = Node(tmp_path, sysfs="two-sockets-smt")
    node.host.write(f"{DISK}/numa_node", "1")
    (node.host.folder / DISK / "nvme0n1").mkdir()
    link = node.host.folder / "sys/dev/block/259:0"
    link.parent.mkdir(parents=True)
    link.symlink_to(node.host.folder / DISK / "nvme0n1")
    return node


@pytest.mark.parametrize("listed", [False, True])
async def test_cpus_are_near_a_containers_devices(
    sockets: Node, monkeypatch: pytest.MonkeyPatch, *, listed: bool
) -> None:
    """Also of one that the runtime lists. A device of many containers is looked for once then."""
    looked: list[str] = []
    realpath = os.path.realpath

    def noted(path: str, **options: Any) -> str:
        looked.append(str(path))
        return realpath(path, **options)

    devices = [pb.LinuxDevice(path="/dev/data", type="b", major=259, minor=0)]
    async with runtime_of(sockets, policy="topology") as runtime:
        if listed:
            runtime.disconnect()
            for name in ("db", "log"):
                runtime.there(runtime.pod(name, "exclusive", kata=False), 2, "", devices=devices)
            monkeypatch.setattr(os.path, "realpath", noted)
            await runtime.connect()
            assert sum(path.endswith("sys/dev/block/259:0") for path in looked) == 1
        else:
            web = await runtime.run(runtime.pod("web", "exclusive", kata=False), 2)
            assert cpu_numbers(web) <= set(range(8)), "without devices the first node is chosen"
            await runtime.end("c-web")
            await runtime.end_pod("web")
            await runtime.run(runtime.pod("db", "exclusive", kata=False), 2, devices=devices)
        assert cpu_numbers(runtime.cpus["c-db"]) <= set(range(8, 16))


# ---- what the kubelet lists of a pod --------------------------------------------------------


async def _listed(node: Node, holds: Any) -> None:
    """Let the kubelet's list be read until something holds of the exclusive CPUs."""
    for turn in range(500):
        if turn % 100 == 0:
            await node.clock.move(11)
        if holds(await _exclusive(node)):
            return
        await node.pause()
    raise AssertionError(await _allocation(node))


@pytest.fixture
def kubelet() -> Any:
    with playing_kubelet() as one:
        yield one


async def test_annotations_of_the_creation_are_old(node: Node, kubelet: Kubelet) -> None:
    """What the kubelet reported later counts for new containers, and after a reconnection."""
    async with runtime_of(node, pods_url=kubelet.url("/open")) as runtime:
        pod = runtime.pod("db")
        await runtime.run(pod, 1)
        kubelet.pods["uid-db"] = {CLASS: "exclusive"}
        await _listed(node, lambda cpus: len(cpus) == 1)
        own = await _exclusive(node)
        second = cpu_numbers(await runtime.make(pod, 1, "c-2", app="second"))
        assert (len(second), second & own) == (1, set())
        for pods in ({"uid-db": {CLASS: "exclusive"}}, {}):  # another list, in which it is missing
            kubelet.pods = pods
            await node.clock.move(11)
            runtime.disconnect()
            await runtime.connect()
            assert await _exclusive(node) == own | second


async def test_a_sidecar_keeps_its_cpus(node: Node, kubelet: Kubelet) -> None:
    """It runs while the next container is created; it restarts as any other container does."""
    async with runtime_of(node, pods_url=kubelet.url("/open")) as runtime:
        kubelet.pods["uid-db"] = {CLASS: "exclusive"}
        kubelet.specs["uid-db"] = {"initContainers": [{"name": "setup"}]}
        pod = runtime.pod("db")
        await runtime.run(pod, 1, "c-proxy", app="proxy")
        await _listed(node, lambda cpus: len(cpus) == 1)
        own = await _exclusive(node)
        await runtime.stop("c-proxy")  # just now, when the app is created
        app = cpu_numbers(await runtime.run(pod, 2))
        assert (len(app), app & own) == (2, set())
        assert cpu_numbers(await runtime.run(pod, 1, "c-proxy-1", app="proxy")) == own


async def test_pod_level_resources_are_shared(node: Node, kubelet: Kubelet) -> None:
    """As the real kubelet's static policy, `static` gives such pods nothing exclusive."""
    alloc = {"policy": "static", "eligibility": "kubelet", "pods_url": kubelet.url("/open")}
    async with runtime_of(node, **alloc) as runtime:
        pod = runtime.pod("db", kata=False)
        assert len(cpu_numbers(await runtime.run(pod, 2))) == 2
        kubelet.pods["uid-db"] = {}
        kubelet.specs["uid-db"] = {"resources": {"limits": {"cpu": "2"}}}
        await _listed(node, lambda cpus: not cpus)
        (grant,) = (one for one in (await _allocation(node))["grants"] if one["id"] == "c-db")
        assert "pod-level" in " ".join(grant["reasons"])
