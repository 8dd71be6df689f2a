"""What NRI tells of Kata's containers while kata-pin only observes: threads follow.

A pod's container is `c-<pod>`, unless a test names it. The host has 16 CPUs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.boundary.node import Node
from tests.boundary.runtime import RUNNING, ContainerRuntime, runtime_of

ALL = "0-15"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
async def runtime(node: Node) -> AsyncIterator[ContainerRuntime]:
    async with runtime_of(node, policy="none") as one:
        yield one


async def _states(node: Node, pod: str) -> dict[str, str]:
    """Return the state of each container of a pod, but for the pod's own."""
    containers = (await node.shown(node.vms[pod])).get("containers", ())
    return {one["id"]: one["state"] for one in containers if one["id"] != pod}


async def _update(runtime: ContainerRuntime, name: str, cpus: str) -> None:
    runtime.cpus[name] = cpus
    await runtime.tell("PostUpdateContainer", name)


async def test_a_life(runtime: ContainerRuntime, node: Node) -> None:
    """Each event changes the container, and its threads are placed by it."""
    await runtime.run(runtime.pod("web"), cpus="2-3")
    vm = node.vms["web"]
    await node.placed(vm, main="2-3", v0="2-3")
    assert await _states(node, "web") == {"c-web": "running"}
    await _update(runtime, "c-web", "5")
    await node.placed(vm, main="5")
    await runtime.run("web", 0, "c-2", cpus="8", app="log")
    await node.placed(vm, main="5,8")
    await runtime.stop("c-web")
    await node.placed(vm, main="8")
    await runtime.end_pod("web")
    await node.placed(vm, main=ALL)


@pytest.mark.parametrize("late", ["PostStartContainer", "PostUpdateContainer"])
async def test_what_has_ended_stays_ended(runtime: ContainerRuntime, node: Node, late: str) -> None:
    """An event that comes after a container's end does not revive it."""
    await runtime.run(runtime.pod("web"), cpus="2")
    await runtime.run("web", 0, "c-2", cpus="8", app="log")
    await runtime.stop("c-web")
    runtime.containers["c-web"].state = RUNNING
    await runtime.tell(late, "c-web")
    await node.ask("reconcile")
    assert node.vms["web"].masks["main"] == "8"


async def test_news_count_more_than_the_bundle(runtime: ContainerRuntime, node: Node) -> None:
    """A cpuset from NRI replaces what a hook read in config.json."""
    pod = runtime.pod("web")
    vm = node.vms[pod]
    await node.create(vm, "c-web", "7")
    assert vm.masks["main"] == "7"
    await runtime.run(pod, cpus="3")
    await node.placed(vm, main="3")
    await node.hook("createRuntime", "c-web", vm.pid)
    await node.placed(vm, main="3")


async def test_pods_of_another_runtime_leave_nothing(runtime: ContainerRuntime, node: Node) -> None:
    """Nor does the end of a container that nobody told of."""
    await runtime.run(runtime.pod("runc", kata=False), cpus="2")
    await runtime.stop("c-runc")
    pod = runtime.pod("web")
    runtime.there(pod, 0, "2")
    await runtime.stop("c-web")
    assert {one["id"] for one in (await node.ask("state"))["sandboxes"]} <= {"web"}
    assert [row for row in node.rows("containers", "id") if row != ("web",)] == []


async def test_a_container_does_not_change_pods(runtime: ContainerRuntime, node: Node) -> None:
    """A record of another sandbox is not overwritten by what a later event says."""
    await runtime.run(runtime.pod("web"), cpus="2")
    runtime.pod("db")
    runtime.containers["c-web"].pod_sandbox_id = "db"
    await _update(runtime, "c-web", "9")
    await node.ask("reconcile")
    assert node.vms["web"].masks["main"] == "2"
    assert await _states(node, "db") == {}


async def test_synchronize_replaces_what_was_known(runtime: ContainerRuntime, node: Node) -> None:
    """New ones, updates, and what is gone, also of pods that were taken for another runtime's."""
    for name, cpus in (("web", "2"), ("db", "3")):
        await runtime.run(runtime.pod(name), cpus=cpus)
    await runtime.run("web", 0, "c-gone", cpus="9", app="log")
    await node.placed(node.vms["web"], main="2,9")
    runtime.disconnect()
    del runtime.containers["c-gone"]
    runtime.cpus["c-web"] = "5"
    runtime.there(runtime.pod("new"), 0, "7")
    await runtime.connect()
    for name, cpus in (("web", "5"), ("db", "3"), ("new", "7")):
        await node.placed(node.vms[name], main=cpus)
        assert node.vms[name].masks["main"] == cpus
