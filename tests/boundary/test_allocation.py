"""Deciding cpusets over NRI's wire: what each container has, as the runtime applied it.

The host has 8 CPUs. A pod's container is `c-<pod>`, unless a test names it.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.boundary.host import cpu_numbers, kernel_list
from tests.boundary.node import Node
from tests.boundary.runtime import CLASS, FAIL, ContainerRuntime, Refused, runtime_of
from tests.support.checkpoint import checkpoint, replace
from tests.support.kubeletpods import playing_kubelet

ALL = "0-7"
BY_PODS = 3
"""Pods that have to show another plugin before kata-pin stops deciding."""

EXPIRED_S = 601.0


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, sysfs=8)


@pytest.fixture
async def runtime(node: Node) -> AsyncIterator[ContainerRuntime]:
    async with runtime_of(node) as one:
        yield one


def _without(*lists: str) -> str:
    """Return the CPUs of the host that are in none of these lists."""
    return kernel_list(cpu_numbers(ALL).difference(*map(cpu_numbers, lists)))


async def _allocation(node: Node) -> dict[str, Any]:
    shown: dict[str, Any] = (await node.ask("state"))["allocation"]
    return shown


async def _grants(node: Node) -> dict[str, Any]:
    return {one["id"]: one for one in (await _allocation(node))["grants"]}


async def _exclusive(node: Node) -> str:
    exclusive: str = (await _allocation(node))["pools"]["exclusive"]
    return exclusive


async def _pending(node: Node) -> dict[str, str]:
    grants = (await _grants(node)).values()
    return {one["id"]: one["pending"] for one in grants if one["pending"] is not None}


async def _reload(node: Node, **settings: Any) -> None:
    node.change(**settings)
    await node.ask("reload")


def _orders(node: Node, **classes: str) -> Any:
    """Write the administrator's overrides; return a condition that they are in force."""
    text = "".join(f"shop/{name} {cpu_class}\n" for name, cpu_class in classes.items())
    replace(node.folder / "orders", text)


# ---- creations ------------------------------------------------------------------------------


async def test_exclusive_cpus_leave_everybody_else(runtime: ContainerRuntime, node: Node) -> None:
    """The creation is adjusted, and the same answer takes the CPUs from others; then back."""
    web, db = runtime.pod("web", kata=False), runtime.pod("db", "exclusive", kata=False)
    assert await runtime.run(web) == ALL
    own = await runtime.run(db, 2)
    assert len(cpu_numbers(own)) == 2
    assert runtime.cpus["c-web"] == _without(own)
    await runtime.end("c-db")
    await runtime.end_pod(db)
    assert await _exclusive(node) == ""
    await runtime.make(runtime.pod("log", kata=False))
    assert runtime.cpus["c-web"] == ALL


async def test_a_kata_container_without_a_quota_gets_no_cpuset(runtime: ContainerRuntime) -> None:
    """Neither at creation nor by any later answer, whatever becomes of the pools (D14)."""
    assert await runtime.run(runtime.pod("web")) == ""
    await runtime.run(runtime.pod("db", "exclusive"), 2)
    await runtime.end("c-db")
    assert runtime.cpus["c-web"] == ""
    assert (await _grants(runtime.node))["c-web"]["cpuset"] == ""


async def test_the_creation_is_recorded_with_the_decision(
    runtime: ContainerRuntime, node: Node
) -> None:
    """A Kata container is shown at once, its threads follow; another runtime's is not."""
    own = await runtime.make(runtime.pod("db", "exclusive"), 2)
    await runtime.make(runtime.pod("web", kata=False))
    (shown,) = (await node.ask("state"))["sandboxes"]
    container = next(one for one in shown["containers"] if one["id"] == "c-db")
    assert (container["state"], container["source"]) == ("created", "nri:CreateContainer")
    await node.placed(node.vms["db"], main=own)


async def test_a_strict_refusal(runtime: ContainerRuntime, node: Node) -> None:
    """A container that cannot be served is refused with the reason, and leaves nothing behind."""
    pod = runtime.pod("db", "exclusive", annotations={FAIL: "strict"})
    with pytest.raises(Refused, match="CPUs"):
        await runtime.create(pod, 64)
    assert "c-db" not in await _grants(node)
    (refused,) = (await _allocation(node))["refused"]
    assert (refused["kind"], refused["strict"]) == ("not-enough-cpus", True)
    node.host.set_online("0-5")
    await runtime.make(runtime.pod("web", kata=False))
    assert "c-db" not in await _grants(node)


async def test_best_effort_runs_in_the_shared_pool(runtime: ContainerRuntime, node: Node) -> None:
    """Without strict it gets the shared pool's cpuset, and that is said once."""
    assert await runtime.run(runtime.pod("db", "exclusive"), 64) == ALL
    for _ in range(3):
        await node.ask("reconcile")
    assert (await _allocation(node))["refusals"] == 1


async def test_a_foreign_cpuset_is_not_replaced(runtime: ContainerRuntime) -> None:
    """A container that came with a cpuset keeps it: setting it twice is a conflict."""
    await runtime.make(runtime.pod("db", "exclusive"), 2, cpus="3-4")
    assert not runtime.adjusted["c-db"].HasField("linux")
    await runtime.run(runtime.pod("web", kata=False))
    await runtime.end("c-web")
    assert runtime.cpus["c-db"] == "3-4"


async def test_a_typo_in_an_annotation_is_said_once(
    runtime: ContainerRuntime, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a note as long as the pod runs, and one warning, not one in each pass."""
    pod = runtime.pod("web", "shared")
    for name in ("c1", "c2", "c3"):
        await runtime.run(pod, 1, name)
        await node.ask("reconcile")
    (note,) = (await _allocation(node))["notes"]
    assert "'shared' is not none, share or exclusive" in note["text"]
    assert caplog.text.count("is not none, share or exclusive") == 1


async def test_a_policy_that_nobody_has(node: Node) -> None:
    """A wrong setting does not stop the daemon: it is shown, and nothing is decided."""
    async with runtime_of(node, policy="crane") as runtime:
        assert await runtime.run(runtime.pod("db", "exclusive"), 2) == ""
        assert "unknown policy 'crane'" in (await _allocation(node))["suspended"]


async def test_off_by_default(node: Node) -> None:
    """Without a policy kata-pin only observes NRI, and shows no allocation."""
    async with runtime_of(node, policy="none") as runtime:
        await runtime.run(runtime.pod("db", "exclusive"), 2, cpus="1-2")
        assert runtime.cpus["c-db"] == "1-2"
        assert await _allocation(node) is None


# ---- who decides ----------------------------------------------------------------------------


async def test_kubelet_static_is_observed(runtime: ContainerRuntime, node: Node) -> None:
    """While the kubelet decides every answer is the observer's; its end brings grants back."""
    own = await runtime.run(runtime.pod("db", "exclusive"), 2)
    node.host.kubelet_state.write_text(checkpoint("0-7"))
    assert await runtime.run(runtime.pod("log", "exclusive", kata=False), 2) == ""
    allocation = await _allocation(node)
    assert "kubelet" in allocation["suspended"]
    assert [note["code"] for note in allocation["notes"]] == ["alloc-suspended"]
    node.host.kubelet_state.unlink()
    await runtime.run(runtime.pod("web", kata=False))
    assert runtime.cpus["c-db"] == own
    assert not cpu_numbers(runtime.cpus["c-web"]) & cpu_numbers(own)


async def test_what_the_kubelet_gave_is_in_the_pools_later(
    runtime: ContainerRuntime, node: Node
) -> None:
    """When the kubelet's static policy ends, its cpusets are replaced like any other."""
    node.host.kubelet_state.write_text(checkpoint("0-1"))
    await runtime.make(runtime.pod("noise", kata=False), cpus=ALL)
    node.host.kubelet_state.unlink()
    own = await runtime.make(runtime.pod("db", "exclusive"), 2)
    assert runtime.cpus["c-noise"] == _without(own)


async def test_what_is_made_while_observing_is_in_the_pools_later(
    runtime: ContainerRuntime, node: Node
) -> None:
    """Also its size, were it changed meanwhile; but not what has ended."""
    first = await runtime.run(runtime.pod("old", "exclusive"), 1)
    await _reload(node, mode="observe")
    assert await runtime.run(runtime.pod("noise", kata=False)) == ""
    assert await runtime.run(runtime.pod("db", "exclusive"), 1) == ""
    await runtime.resize("c-db", 2)
    await runtime.resize("c-old", 2)
    await runtime.run(runtime.pod("gone", kata=False))
    await runtime.stop("c-gone")
    await _reload(node, mode="act")
    await runtime.make(runtime.pod("web", kata=False))
    grants = await _grants(node)
    assert "c-gone" not in grants
    assert len(cpu_numbers(grants["c-db"]["exclusive"])) == 2
    assert cpu_numbers(first) < cpu_numbers(grants["c-old"]["exclusive"])
    assert runtime.cpus["c-noise"] == runtime.cpus["c-web"]
    assert runtime.cpus["c-web"] == (await _allocation(node))["pools"]["shared"]


async def test_what_an_ended_connection_told_is_forgotten(
    runtime: ContainerRuntime, node: Node
) -> None:
    """A container that is not listed again is in no pool; one that is, has its cpuset."""
    await _reload(node, mode="observe")
    await runtime.run(runtime.pod("noise", kata=False))
    await runtime.run(runtime.pod("web", kata=False))
    runtime.disconnect()
    del runtime.containers["c-noise"]
    await _reload(node, mode="act")
    await runtime.connect()
    assert (await _grants(node)).keys() == {"c-web"}
    assert runtime.cpus["c-web"] == ALL


# ---- other plugins --------------------------------------------------------------------------


async def _conflict(runtime: ContainerRuntime, name: str, namespace: str) -> None:
    """Have a creation fail that was adjusted, and the next one succeed with another's cpuset."""
    pod = runtime.pod(name, "exclusive", kata=False, namespace=namespace)
    assert await runtime.create(pod, 1)
    await runtime.stop(f"c-{name}")
    assert await runtime.create(pod, 1, f"c-{name}-2") == ""
    await runtime.created(f"c-{name}-2", "1")


async def test_a_creation_that_failed_is_not_adjusted_again(runtime: ContainerRuntime) -> None:
    """A plugin behind us may have set the same: that container's next try goes through as it is.

    Once it runs without a cpuset it has its CPUs, with the next answer.
    """
    pod = runtime.pod("db", "exclusive", kata=False)
    assert await runtime.create(pod, 2)
    await runtime.stop("c-db")
    assert await runtime.make(pod, 2, "c-db-2") == ""
    own = await _exclusive(runtime.node)
    web = await runtime.make(runtime.pod("web", kata=False))
    assert (runtime.cpus["c-db-2"], web) == (own, _without(own))


async def test_a_strict_container_beside_a_plugin_that_is_only_suspected(
    runtime: ContainerRuntime,
) -> None:
    """It is adjusted again: without its CPUs it would fail anyway."""
    pod = runtime.pod("db", "exclusive", kata=False, annotations={FAIL: "strict"})
    for number in range(3):
        assert await runtime.create(pod, 2, f"c-db-{number}")
        await runtime.stop(f"c-db-{number}")


async def test_a_start_that_fails_is_no_conflict(runtime: ContainerRuntime) -> None:
    """A container that was created and never started is no evidence of other plugins."""
    pod = runtime.pod("db", "exclusive")
    own = await runtime.make(pod, 2)
    await runtime.stop("c-db")
    assert await runtime.make(pod, 2, "c-db-2") == own


async def test_one_tenants_failures_end_nothing(runtime: ContainerRuntime, node: Node) -> None:
    """Pods whose creation fails repeatedly do not stop the allocator for others."""
    for number in range(BY_PODS):
        pod = runtime.pod(f"db{number}", "exclusive", kata=False)
        for attempt in range(4):
            name = f"c-{number}-{attempt}"
            assert bool(await runtime.create(pod, 1, name)) is (attempt % 2 == 0)
            await runtime.stop(name)
    assert (await _allocation(node))["suspended"] == ""


async def test_a_later_plugin_ends_adjusting(runtime: ContainerRuntime, node: Node) -> None:
    """Pods that are created only without us, with another's cpuset: nobody is adjusted then.

    A container that rather fails than goes without its CPUs is refused. All ends with the
    connection; what the rival gave a cpuset is left alone then too.
    """
    for number in range(BY_PODS):
        await _conflict(runtime, f"db{number}", f"n{number}")
    assert "asked after kata-pin" in (await _allocation(node))["suspended"]
    assert await runtime.make(runtime.pod("noise", kata=False)) == ""
    strict = runtime.pod("strict", "exclusive", annotations={FAIL: "strict"})
    with pytest.raises(Refused, match="another NRI plugin"):
        await runtime.create(strict, 1)
    runtime.disconnect()
    await runtime.connect()
    assert await runtime.make(runtime.pod("web", kata=False)) == runtime.cpus["c-noise"] != ""
    assert runtime.cpus["c-db0-2"] == "1"


async def test_an_earlier_plugin_is_left_alone_until_nothing_is_seen_of_it(
    runtime: ContainerRuntime, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """After some foreign cpusets in a row nothing is decided, for ten minutes; both are said."""
    for number in range(BY_PODS + 1):  # what shows it is said with the next event
        await runtime.make(runtime.pod(f"web{number}", kata=False), cpus="3")
    assert "asked before kata-pin" in (await _allocation(node))["suspended"]
    await node.clock.move(EXPIRED_S)
    assert len(cpu_numbers(await runtime.make(runtime.pod("db", "exclusive"), 2))) == 2
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert sum("suspended: another NRI plugin" in text for text in said) == 1
    assert sum("assigning CPUs again" in text for text in said) == 1


# ---- sizes and moves ------------------------------------------------------------------------


async def test_a_resize_keeps_and_grows(runtime: ContainerRuntime) -> None:
    """UpdateContainer with another limit changes the container itself in the same answer."""
    had = await runtime.run(runtime.pod("db", "exclusive", kata=False), 2)
    await runtime.resize("c-db", 3)
    now = cpu_numbers(runtime.cpus["c-db"])
    assert len(now) == 3
    assert cpu_numbers(had) < now


async def test_an_owner_leaves_before_others_come(runtime: ContainerRuntime, node: Node) -> None:
    """Others get a VM's former CPUs only after the pass over it: while it runs they are held."""
    await runtime.make(runtime.pod("web", kata=False))
    had = await runtime.run(runtime.pod("db", "exclusive"), 4)
    vm = node.vms["db"]
    await node.placed(vm, main=had)
    seen: list[str] = []
    node.kernel.before_set = lambda _: seen.append(runtime.cpus["c-web"])
    await runtime.resize("c-db", 2)
    left = await _exclusive(node)
    assert len(cpu_numbers(left)) == 2
    await node.until(lambda: seen and vm.masks["main"] == left, "db on fewer CPUs")
    await runtime.make(runtime.pod("log", kata=False))
    assert runtime.cpus["c-web"] == _without(left)
    assert set(seen) == {_without(had)}


async def test_an_override_changes_who_runs(node: Node) -> None:
    """share, exclusive and back, without recreating the container; by the next answer."""
    async with runtime_of(node, orders=str(node.folder / "orders")) as runtime:
        await runtime.run(runtime.pod("web", kata=False), 2)
        await runtime.run(runtime.pod("log", kata=False))

        async def ordered(cpu_class: str) -> dict[str, Any]:
            _orders(node, web=cpu_class)
            while (grant := (await _grants(node))["c-web"])["cpu_class"] != cpu_class:
                await node.pause()
            return dict(grant)

        assert (await ordered("exclusive"))["override"] == "exclusive"
        own = await _exclusive(node)
        assert await _pending(node) == {"c-web": own, "c-log": _without(own)}
        await runtime.make(runtime.pod("new", kata=False))
        assert runtime.cpus["c-web"] == own
        assert (await ordered("share"))["exclusive"] == ""
        assert await _exclusive(node) == ""
        _orders(node, other="share")
        while (await _grants(node))["c-web"]["cpu_class"] != "none":
            await node.pause()
        replace(node.folder / "orders", "nonsense\n")
        while not (await _allocation(node))["problems"]:
            await node.pause()


async def test_an_override_by_the_sandboxs_id(node: Node) -> None:
    """Where no Kubernetes names pods: it wins over what annotations and the kubelet's list say."""
    with playing_kubelet() as kubelet:
        alloc = {"orders": str(node.folder / "orders"), "pods_url": kubelet.url("/open")}
        async with runtime_of(node, **alloc) as runtime:
            for name in ("s1", "s2"):
                runtime.pod(name, kata=False)
                runtime.pods[name].name = runtime.pods[name].namespace = ""
                await runtime.run(name, 2)
            replace(node.folder / "orders", "s1 exclusive\n")
            await _classes(node, c_s1="exclusive", c_s2="none")
            kubelet.pods["uid-s1"] = {CLASS: "share"}
            kubelet.pods["uid-s2"] = {CLASS: "share"}
            runtime.disconnect()  # then the sandboxes of other runtimes' pods are not known
            await _classes_as_listed(node, c_s1="exclusive", c_s2="share")


async def _classes_as_listed(node: Node, **classes: str) -> None:
    """Let the kubelet's list be read until containers have these classes.

    More than once: it may be read already while time passes, from before a test changed it.
    """
    await _classes(node, due_s=11, **classes)


async def _classes(node: Node, due_s: float = 0, **classes: str) -> None:
    """Wait until containers (`c_db` for c-db) have these classes; `due_s` pass now and then."""
    wanted = {name.replace("_", "-"): cpu_class for name, cpu_class in classes.items()}
    seen: dict[str, str] = {}
    for turn in range(500):
        if due_s and turn % 100 == 0:
            await node.clock.move(due_s)
        seen = {name: grant["cpu_class"] for name, grant in (await _grants(node)).items()}
        if seen == wanted:
            return
        await node.pause()
    raise AssertionError(f"containers are {seen}, not {wanted}")


async def test_annotations_of_the_kubelets_list(node: Node) -> None:
    """They change who runs, for pods in the list; others keep what they were created with."""
    with playing_kubelet() as kubelet:
        async with runtime_of(node, pods_url=kubelet.url("/open")) as runtime:
            await runtime.run(runtime.pod("web", kata=False), 2)
            await runtime.run(runtime.pod("db", "share", kata=False), 2)
            kubelet.pods["uid-web"] = {CLASS: "exclusive"}
            await _classes_as_listed(node, c_web="exclusive", c_db="share")
            kubelet.pods["uid-web"] = {}
            await _classes_as_listed(node, c_web="none", c_db="share")


async def test_an_offline_cpu_is_replaced(runtime: ContainerRuntime, node: Node) -> None:
    """A CPU that goes is in no grant afterwards, and the sandbox's threads follow."""
    had = cpu_numbers(await runtime.run(runtime.pod("db", "exclusive"), 2))
    gone = min(had)
    node.host.set_online(kernel_list(cpu_numbers(ALL) - {gone}))
    await runtime.make(runtime.pod("web", kata=False))
    now = cpu_numbers(await _exclusive(node))
    assert (len(now), gone in now) == (2, False)
    vm = node.vms["db"]
    await node.until(lambda: cpu_numbers(vm.masks["main"]) <= now, "db's threads")


async def test_cpus_of_threads_that_cannot_be_moved_are_held_back(
    runtime: ContainerRuntime, node: Node
) -> None:
    """Nobody else gets them for half a minute: then the sandbox is waited for no more."""
    await runtime.make(runtime.pod("web", kata=False))
    had = await runtime.run(runtime.pod("db", "exclusive"), 4)
    vm = node.vms["db"]
    await node.placed(vm, main=had)
    node.kernel.refuse[vm.pid] = errno.EPERM
    await runtime.resize("c-db", 2)
    held = _without(had)
    for seconds in (0, 15, 14):
        await node.clock.move(seconds)
        await node.ask("reconcile")
        await runtime.make(runtime.pod(f"log{seconds}", kata=False))
        assert runtime.cpus["c-web"] == held
    await node.clock.move(2)
    await node.ask("reconcile")
    await runtime.make(runtime.pod("last", kata=False))
    assert runtime.cpus["c-web"] == _without(await _exclusive(node))


async def test_cpus_that_go_while_nothing_can_be_stored(
    runtime: ContainerRuntime, node: Node
) -> None:
    """With a full disk the grant cannot follow; with the next event they are in none."""
    had = cpu_numbers(await runtime.run(runtime.pod("db", "exclusive"), 2))
    with node.registry_refuses("alloc"):
        node.host.set_online(kernel_list(cpu_numbers(ALL) - {min(had)}))
        await node.request("reconcile")
        await runtime.create(runtime.pod("web", kata=False))
        assert cpu_numbers(await _exclusive(node)) == had
    await runtime.make(runtime.pod("log", kata=False))
    now = cpu_numbers(await _exclusive(node))
    assert (len(now), min(had) in now) == (2, False)


# ---- restarts of containers -----------------------------------------------------------------


@pytest.mark.parametrize("kata", [False, True])
async def test_a_failing_start_takes_nothing_more(runtime: ContainerRuntime, kata: bool) -> None:
    """Each try gets the CPUs of the one before; the runtime reports no end of any of them."""
    pod = runtime.pod("db", "exclusive", kata=kata)
    own = await runtime.make(pod, 3)
    for number in range(4):
        assert await runtime.make(pod, 3, f"c-db-{number}") == own
    containers = {
        one["id"] for one in (await _grants(runtime.node)).values() if one["kind"] == "container"
    }
    assert containers == {"c-db-3"}
    assert len(cpu_numbers(await runtime.make(runtime.pod("web", "exclusive"), 3))) == 3


async def test_a_start_that_failed_is_released_with_its_container(
    runtime: ContainerRuntime,
) -> None:
    """What never had a process has nothing to come back for, once the runtime forgets it."""
    await runtime.make(runtime.pod("db", "exclusive", kata=False), 3)
    await runtime.remove("c-db")
    assert await _grants(runtime.node) == {}


@pytest.mark.parametrize("kata", [False, True])
async def test_a_restarting_container_keeps_its_cpus(
    runtime: ContainerRuntime, node: Node, kata: bool
) -> None:
    """Between two instances they are nobody else's; the next one has them, until the pod ends."""
    await runtime.run(runtime.pod("web", kata=False))
    pod = runtime.pod("db", "exclusive", kata=kata)
    own = await runtime.run(pod, 2)
    name = "c-db"
    for number in range(2):
        await runtime.end(name)
        assert await _exclusive(node) == own
        other = runtime.pod(f"other{number}", "exclusive", kata=False)
        assert not cpu_numbers(await runtime.make(other, 6)) & cpu_numbers(own)
        await runtime.remove(f"c-other{number}")
        name = f"c-db-{number}"
        assert await runtime.run(pod, 2, name) == own
    await runtime.end(name)
    await runtime.end_pod(pod, removed=False)
    assert await _exclusive(node) == ""


async def test_a_container_with_shared_cpus_keeps_nothing(runtime: ContainerRuntime) -> None:
    """It follows the pool: there is nothing to keep for its next instance."""
    await runtime.run(runtime.pod("web", kata=False))
    await runtime.stop("c-web")
    assert await _grants(runtime.node) == {}


async def test_the_next_instance_asks_for_more(runtime: ContainerRuntime, node: Node) -> None:
    """It keeps its CPUs and gets more; what cannot be served strictly is refused."""
    pod = runtime.pod("db", "exclusive", kata=False, annotations={FAIL: "strict"})
    own = await runtime.run(pod, 2)
    await runtime.stop("c-db")
    with pytest.raises(Refused):
        await runtime.create(pod, 64, "c-db-1")
    assert await _exclusive(node) == own
    more = cpu_numbers(await runtime.make(pod, 4, "c-db-2"))
    assert (len(more), cpu_numbers(own) <= more) == (4, True)


@pytest.mark.parametrize("kata", [False, True])
async def test_init_containers_leave_their_cpus_to_the_next(
    runtime: ContainerRuntime, kata: bool
) -> None:
    """Two init containers and the app, never more than 3 CPUs; the rest is free at once."""
    node, pod = runtime.node, runtime.pod("db", "exclusive", kata=kata)
    owned = []
    for name, size in (("one", 2), ("two", 3)):
        await runtime.run(pod, size, f"c-{name}")
        await runtime.stop(f"c-{name}")
        owned.append(cpu_numbers(await _exclusive(node)))
    assert (len(owned[1]), owned[0] <= owned[1]) == (3, True)
    app = await runtime.run(pod, 1, "c-app")
    assert await _exclusive(node) == app
    assert cpu_numbers(app) <= owned[1]


async def test_the_end_of_an_old_sandbox_leaves_the_new_one_its_cpus(
    runtime: ContainerRuntime,
) -> None:
    """Both have the pod's uid: what the new sandbox's container has stays its own."""
    old, new = (runtime.pod(name, "exclusive", kata=False, uid="uid") for name in ("old", "new"))
    await runtime.run(old, 2)
    await runtime.stop("c-old")
    own = await runtime.run(new, 2)
    await runtime.end_pod(old)
    assert await _exclusive(runtime.node) == own
    await runtime.end_pod(new)
    assert await _grants(runtime.node) == {}


# ---- the registry ---------------------------------------------------------------------------


async def test_what_is_not_stored_is_not_delivered(runtime: ContainerRuntime, node: Node) -> None:
    """A commit that fails leaves the creation as it was: others are updated with the next one."""
    await runtime.make(runtime.pod("web", kata=False))
    pod = runtime.pod("db", "exclusive", kata=False)
    with node.registry_refuses():
        assert await runtime.create(pod, 2) == ""
        assert runtime.cpus["c-web"] == ALL
    assert await _exclusive(node) == ""
    own = await runtime.make(pod, 2, "c-db-2")
    assert runtime.cpus["c-web"] == _without(own)


async def test_a_record_that_cannot_be_stored_takes_its_decision_back(
    runtime: ContainerRuntime, node: Node
) -> None:
    """Both are one transaction: nobody else lost the CPUs, and nothing is shown of them."""
    await runtime.make(runtime.pod("web", kata=False))
    pod = runtime.pod("db", "exclusive", annotations={FAIL: "strict"})
    with node.registry_refuses("containers"):
        assert await runtime.create(pod, 2) == ""
        await runtime.create(runtime.pod("much", "exclusive"), 64)
        allocation = await _allocation(node)
        assert (allocation["refusals"], allocation["pools"]["exclusive"]) == (0, "")
    own = await runtime.make(pod, 2, "c-db-2")
    assert runtime.cpus["c-web"] == _without(own)


async def test_who_was_made_undecided_is_decided_then(
    runtime: ContainerRuntime, node: Node
) -> None:
    """A container whose creation could not be stored is in the pools once it runs."""
    with node.registry_refuses():
        await runtime.create(runtime.pod("web", kata=False))
    await runtime.created("c-web")
    own = await runtime.make(runtime.pod("db", "exclusive", kata=False), 2)
    assert runtime.cpus["c-web"] == _without(own)


async def test_another_daemon_holds_the_same(runtime: ContainerRuntime, node: Node) -> None:
    """Killed or not: what runs keeps its CPUs, whatever the runtime lists of them."""
    await runtime.run(runtime.pod("web", kata=False))
    for number in range(2):
        await runtime.run(runtime.pod(f"db{number}", "exclusive", kata=bool(number)), 1)
    before = await _grants(node), dict(runtime.cpus)
    await node.kill()
    await node.start()
    await runtime.connect()
    assert (await _grants(node), runtime.cpus) == before


async def test_lost_state_is_rebuilt_from_what_runs(runtime: ContainerRuntime, node: Node) -> None:
    """A damaged state counts as lost; containers keep the CPUs that they run on."""
    await runtime.run(runtime.pod("web", kata=False))
    own = await runtime.run(runtime.pod("db", "exclusive"), 2)
    await node.stop()
    with sqlite3.connect(node.runtime_dir / "registry.db") as file:
        file.execute("UPDATE alloc SET state = '{'")
    file.close()
    await node.start()
    await runtime.connect()
    assert await _exclusive(node) == own
    assert runtime.cpus["c-web"] == _without(own)


@pytest.mark.parametrize("living", [True, False])
async def test_a_restart_of_the_daemon_between_two_instances(
    runtime: ContainerRuntime, node: Node, living: bool
) -> None:
    """CPUs stay kept where the pod is listed with its process, else it has ended meanwhile."""
    pod = runtime.pod("db", "exclusive", kata=False)
    own = await runtime.run(pod, 2)
    await runtime.end("c-db")
    await node.stop()
    if not living:
        runtime.pods[pod].pid = 0
    await node.start()
    await runtime.connect()
    assert await _exclusive(node) == (own if living else "")


async def test_synchronize_brings_everything_in_line(node: Node) -> None:
    """What runs is taken in: Kata's and others', each with the cpuset that it is to have."""
    node.configure()
    async with runtime_of(node) as runtime:
        runtime.disconnect()
        for name, cpu_class, kata, size, cpus in (
            ("db", "exclusive", True, 2, "4-5"),
            ("web", "", False, 0, ""),
            ("free", "", True, 0, ""),
        ):
            runtime.there(runtime.pod(name, cpu_class, kata=kata), size, cpus)
        await runtime.connect()
        assert await _exclusive(node) == "4-5"
        assert runtime.cpus == {"c-db": "4-5", "c-web": "0-3,6-7", "c-free": ""}
        guarantee = (await _allocation(node))["guarantee"]
        assert guarantee == "every container of the node"
        runtime.disconnect()
        while (await _allocation(node))["guarantee"] == guarantee:
            await node.pause()


async def test_what_started_without_us_is_found_and_named(node: Node) -> None:
    """A runtime that drops a plugin which was late starts containers without asking it.

    When it connects again all are in the pools. One that asked to be refused and does not fit can
    no longer be: that it runs in the shared pool is reported, once.
    """
    async with runtime_of(node) as runtime:
        await runtime.run(runtime.pod("db", "exclusive"), 2)
        runtime.disconnect()
        strict = {FAIL: "strict"}
        for name, size, kata in (("fits", 2, True), ("vm", 64, True), ("plain", 64, False)):
            pod = runtime.pod(name, "exclusive", kata=kata, annotations=strict)
            runtime.there(pod, size, "")
        runtime.there(runtime.pod("web", kata=False), 0, "")
        await runtime.connect()
        grants = await _grants(node)
        grants = {name: one for name, one in grants.items() if name.startswith("c-")}
        own = {name: len(cpu_numbers(one["exclusive"])) for name, one in grants.items()}
        assert own == {"c-db": 2, "c-fits": 2, "c-vm": 0, "c-plain": 0, "c-web": 0}
        for _ in range(3):
            await node.ask("reconcile")
        allocation = await _allocation(node)
        refused = {one["container"]: (one["kind"], one["strict"]) for one in allocation["refused"]}
        missing = ("not-enough-cpus", False)
        assert refused == {"shop/vm app": missing, "shop/plain app": missing}
        assert allocation["refusals"] == 2
        shared = allocation["pools"]["shared"]
        assert {runtime.cpus[f"c-{name}"] for name in ("vm", "plain", "web")} == {shared}
