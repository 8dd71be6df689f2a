"""Cpusets between two calls of the runtime: sent unasked by NRI or CRI, retried, and given back.

The host has 8 CPUs. The administrator's overrides make containers move.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.boundary.host import cpu_numbers, kernel_list
from tests.boundary.node import Node
from tests.boundary.runtime import OLD, SAFE, ContainerRuntime, runtime_of
from tests.support.checkpoint import checkpoint, replace
from tests.support.criserver import CriServer

ALL = "0-7"
AUDIT = {"affinity_s": 10, "deep_s": 60}
OBSERVES = {"policy": "none"}
CREATED, EXITED = 0, 2


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, sysfs=8, audit=AUDIT)


@pytest.fixture
async def runtime(node: Node) -> AsyncIterator[ContainerRuntime]:
    """A runtime that takes updates at any time, with two containers of other pods."""
    async with _pushing(node, SAFE) as one:
        yield one


def _pushing(node: Node, version: str, **alloc: Any) -> Any:
    return runtime_of(node, version, orders=str(node.folder / "orders"), **alloc)


@pytest.fixture
def server(node: Node) -> Iterator[CriServer]:
    with CriServer(node.folder / "cri.sock") as one:
        yield one


async def _run_two(runtime: ContainerRuntime) -> None:
    for name in ("web", "db"):
        await runtime.run(runtime.pod(name, kata=False), 2)


def _order(node: Node, **classes: str) -> None:
    text = "".join(f"shop/{name} {cpu_class}\n" for name, cpu_class in classes.items())
    replace(node.folder / "orders", text)


async def _allocation(node: Node) -> dict[str, Any]:
    shown: dict[str, Any] = (await node.ask("state"))["allocation"]
    return shown


async def _wait(node: Node, what: str, holds: Any) -> dict[str, Any]:
    """Wait until something holds of what is shown of the allocation."""
    for _ in range(2000):
        shown = await _allocation(node)
        if holds(shown):
            return shown
        await node.pause()
    raise AssertionError(f"{what} did not come")


async def _audit(node: Node) -> None:
    await node.clock.move(61)
    for _ in range(20):
        await node.pause()


def _rest(cpus: str) -> str:
    return kernel_list(cpu_numbers(ALL) - cpu_numbers(cpus))


async def test_what_is_pending_is_sent(runtime: ContainerRuntime, node: Node) -> None:
    """A decision between two calls reaches containers without another call."""
    await _run_two(runtime)
    _order(node, db="exclusive")
    for _ in range(2):
        await runtime.take_push()
    own = runtime.cpus["c-db"]
    assert (len(cpu_numbers(own)), runtime.cpus["c-web"]) == (2, _rest(own))
    assert await runtime.peer.quiet(0.1)
    push = (await _allocation(node))["push"]
    assert push == {"channel": "nri", "reason": "", "problem": "", "failures": []}


async def test_owners_leave_before_others_come(runtime: ContainerRuntime, node: Node) -> None:
    """Cpusets that only become smaller are sent first."""
    await _run_two(runtime)
    _order(node, db="exclusive")
    for _ in range(2):
        await runtime.take_push()
    _order(node, web="exclusive")
    assert [(await runtime.take_push())[0] for _ in range(2)] == ["c-web", "c-db"]
    assert runtime.cpus["c-db"] == _rest(runtime.cpus["c-web"])


async def test_a_refused_update_is_tried_again_and_shown(
    runtime: ContainerRuntime, node: Node
) -> None:
    """It holds nobody up, and is retried after a while, until it is accepted."""
    await _run_two(runtime)
    runtime.answer_push = lambda name, _: None if name == "c-web" else b""
    _order(node, db="exclusive")
    for _ in range(2):
        await runtime.take_push()
    shown = await _wait(node, "the failure", lambda one: one["push"]["failures"])
    (failure,) = shown["push"]["failures"]
    assert (failure["id"], "busy" in failure["message"]) == ("c-web", True)
    assert await runtime.peer.quiet(0.1)
    await node.clock.move(1)
    assert (await runtime.take_push())[0] == "c-web"
    runtime.answer_push = lambda _name, _cpus: b""
    assert await runtime.peer.quiet(0.1)  # else the answer that is on its way looks slow
    await node.clock.move(2)
    assert (await runtime.take_push())[0] == "c-web"
    await _wait(node, "no failure", lambda one: not one["push"]["failures"])


async def test_a_runtime_that_keeps_its_own_opinion(runtime: ContainerRuntime, node: Node) -> None:
    """One that takes an update and reports another cpuset is not asked in a loop."""
    await _run_two(runtime)
    _order(node, db="exclusive")
    for _ in range(7):
        while len(runtime.pushed) < 30 and not await runtime.peer.quiet(0.1):
            name, _ = await runtime.take_push()
            if name == "c-web":
                runtime.cpus[name] = ALL
                await runtime.tell("PostUpdateContainer", name)
        await node.clock.move(1.5)
    tries = [name for name, _ in runtime.pushed].count("c-web")
    assert 1 < tries < 6
    (failure,) = (await _allocation(node))["push"]["failures"]
    assert "reports another" in failure["message"]


async def test_nothing_is_sent_while_the_kubelet_decides(
    runtime: ContainerRuntime, node: Node
) -> None:
    """And a stop waits for no runtime that hangs."""
    await _run_two(runtime)
    node.host.kubelet_state.write_text(checkpoint("0-1"))
    _order(node, db="exclusive")
    await _wait(node, "suspension", lambda one: "kubelet" in one["suspended"])
    assert await runtime.peer.quiet(0.2)
    node.host.kubelet_state.unlink()
    _order(node, db="exclusive", web="share")
    await runtime.peer.request()  # it is never answered
    async with asyncio.timeout(5):
        await node.stop()


async def test_a_runtime_that_is_away_is_asked_later(node: Node) -> None:
    """Nothing is lost, and nothing is said but the problem, until the next try succeeds."""
    socket = node.folder / "cri.sock"
    async with _pushing(node, OLD, cri=str(socket)) as runtime:
        await _run_two(runtime)
        _order(node, db="exclusive")
        await _wait(node, "the problem", lambda one: one["push"]["problem"])
        with CriServer(socket) as server:
            await node.clock.move(30)
            await node.until(lambda: {"c-db", "c-web"} == dict(server.asked).keys(), "the calls")
            await _wait(node, "no problem", lambda one: not one["push"]["problem"])


@pytest.mark.parametrize(
    ("version", "alloc", "channel", "why"),
    [
        (OLD, {}, "", "names no socket"),
        (OLD, {"cri": "cri.sock"}, "cri", "can deadlock"),
        (SAFE, {"cri": "cri.sock"}, "nri", ""),
        (SAFE, {"push": "no"}, "", "alloc.push is no"),
    ],
)
async def test_which_way(
    node: Node, version: str, alloc: dict[str, str], channel: str, why: str
) -> None:
    """NRI where it is safe, else CRI where it is configured, else with the runtime's next call."""
    with CriServer(node.folder / "cri.sock") as server:
        await _goes(node, server, version, alloc, channel, why)


async def _goes(node: Node, server: CriServer, version: str, *expected: Any) -> None:
    alloc, channel, why = expected
    paths = {key: str(node.folder / value) for key, value in alloc.items() if key == "cri"}
    async with _pushing(node, version, **(alloc | paths)) as runtime:
        await _run_two(runtime)
        _order(node, db="exclusive")
        await _wait(node, "the order", lambda one: one["pools"]["exclusive"])
        own = (await _allocation(node))["pools"]["exclusive"]
        if channel == "nri":
            await runtime.take_pushes(c_db=own, c_web=_rest(own))
        if channel == "cri":
            await node.until(lambda: len(server.asked) == 2, "two calls of CRI")
            assert dict(server.asked) == {"c-db": own, "c-web": _rest(own)}
        push = (await _allocation(node))["push"]
        assert push["channel"] == channel
        assert why in push["reason"]
        assert bool(why) is bool(push["reason"])


async def test_a_container_that_cri_does_not_know(node: Node, server: CriServer) -> None:
    """No failure: nothing is shown; the event of its end ends it."""
    async with _pushing(node, OLD, cri=str(server.path)) as runtime:
        await _run_two(runtime)
        server.answer = (grpc.StatusCode.NOT_FOUND, "no such container")
        _order(node, db="exclusive")
        await node.until(lambda: len(server.asked) >= 2, "the calls")
        push = (await _allocation(node))["push"]
        assert (push["failures"], push["problem"]) == ([], "")


# ---- events while an update is on its way ---------------------------------------------------


async def _pending(node: Node) -> set[str]:
    grants = (await _allocation(node))["grants"]
    return {one["id"] for one in grants if one["pending"] is not None}


async def test_our_own_update_comes_back_as_an_event(runtime: ContainerRuntime, node: Node) -> None:
    """Nothing is noted before it is made, and nothing goes along."""
    await _run_two(runtime)
    _order(node, db="exclusive")
    _, name, cpus = await runtime.peer.update()
    both = {"c-web", "c-db"}
    assert await runtime.update(name, cpus) == {}
    assert await _pending(node) == both
    runtime.cpus[name] = cpus
    await runtime.tell("PostUpdateContainer", name)
    assert await _pending(node) == both - {name}


async def test_somebody_elses_update_while_ours_is_on_its_way(
    runtime: ContainerRuntime, node: Node
) -> None:
    """It is taken as any other; what is being sent is in no answer."""
    await _run_two(runtime)
    _order(node, db="exclusive")
    _, name, _ = await runtime.peer.update()
    assert {name, *await runtime.update(name, ALL)} == {"c-web", "c-db"}
    assert await _pending(node) == {name}


async def test_our_own_update_that_is_out_of_date(runtime: ContainerRuntime, node: Node) -> None:
    """What was decided after it was sent takes its place, for that container; it is sent again."""
    await _run_two(runtime)
    await runtime.run(runtime.pod("log", kata=False), 2)
    _order(node, db="exclusive")
    stream, name, old = await runtime.peer.update()
    while name != "c-web":
        runtime.cpus[name] = old
        runtime.peer.reply(stream, b"")
        stream, name, old = await runtime.peer.update()
    _order(node, db="exclusive", log="exclusive")
    pools: dict[str, str] = {}

    def two_own(shown: dict[str, Any]) -> bool:
        pools.update(shown["pools"])
        return len(cpu_numbers(pools["exclusive"])) == 4

    await _wait(node, "two owners", two_own)
    assert await runtime.update("c-web", old) == {"c-web": pools["shared"]}
    runtime.cpus["c-web"] = pools["shared"]
    await runtime.tell("PostUpdateContainer", "c-web")
    runtime.peer.reply(stream, b"")
    while (await runtime.take_push())[0] != "c-web":
        pass
    assert runtime.cpus["c-web"] == pools["shared"]


async def test_what_no_answer_took_along(runtime: ContainerRuntime) -> None:
    """A container that has no cpuset after its creation is sent one: that event has no answer."""
    pod = runtime.pod("db", "exclusive", kata=False)
    own = await runtime.create(pod, 2)
    await runtime.stop("c-db")
    assert await runtime.create(pod, 2, "c-db-2") == ""
    assert await runtime.peer.quiet(0.1)
    await runtime.created("c-db-2")
    await runtime.take_pushes(c_db_2=own)


# ---- switching it off -----------------------------------------------------------------------


async def _next_daemon(runtime: ContainerRuntime, **settings: Any) -> None:
    """Start another daemon with other settings, which the runtime tells everything."""
    await runtime.node.stop()
    runtime.node.change(**settings)
    await runtime.node.start()
    await runtime.connect()


async def test_what_ended_meanwhile_changes_nothing_for_others(
    runtime: ContainerRuntime, node: Node
) -> None:
    """Grants stay until all CPUs are restored, whichever containers have ended before."""
    for name, cpu_class in (("db", "exclusive"), ("log", "exclusive"), ("web", "")):
        await runtime.run(runtime.pod(name, cpu_class), 2)
    had = runtime.cpus["c-web"]
    await node.stop()
    node.change(mode="observe")
    await node.start()
    vm = node.vms["db"]
    vm.end()
    node.kernel.connector.exited(vm.pid, vm.pid)
    await node.until(lambda: not node.rows("containers", where="id = 'c-db'"), "db is forgotten")
    await runtime.connect()
    assert (runtime.cpus["c-web"], runtime.cpus["c-log"]) == (ALL, ALL)
    assert had != ALL


@pytest.mark.parametrize("settings", [{"alloc": OBSERVES}, {"mode": "observe"}])
async def test_the_first_synchronize_gives_everything_back(
    runtime: ContainerRuntime, node: Node, settings: dict[str, Any]
) -> None:
    """A container with the stored cpuset gets all CPUs, once; what is not ours stays."""
    await runtime.run(runtime.pod("web", kata=False))
    await runtime.run(runtime.pod("other", kata=False))
    await runtime.run(runtime.pod("db", "exclusive"), 2)
    await runtime.run(runtime.pod("free"))
    runtime.cpus["c-other"] = "1"
    if "c-web" in runtime.cpus and runtime.cpus["c-web"] == ALL:
        await runtime.take_push()
    await _next_daemon(runtime, **settings)
    assert runtime.cpus == {"c-web": ALL, "c-other": "1", "c-db": ALL, "c-free": ""}
    runtime.cpus["c-web"] = "2-3"
    await _next_daemon(runtime)
    assert runtime.cpus["c-web"] == "2-3"
    assert await runtime.run(runtime.pod("new", kata=False)) == ""


async def test_the_kubelet_takes_over(runtime: ContainerRuntime, node: Node) -> None:
    """Under its static policy nothing is restored: it may have set the same cpuset."""
    own = await runtime.run(runtime.pod("db", "exclusive", kata=False), 2)
    node.host.kubelet_state.write_text(checkpoint("0-1"))
    await _next_daemon(runtime, alloc=OBSERVES)
    assert runtime.cpus["c-db"] == own


async def test_uninstall_pushes(runtime: ContainerRuntime, node: Node) -> None:
    """If cpusets can be pushed, every container has all CPUs when it returns."""
    await _run_two(runtime)
    _order(node, db="exclusive")
    for _ in range(2):
        await runtime.take_push()
    released = asyncio.create_task(node.ask("release"))
    await runtime.take_pushes(c_web=ALL, c_db=ALL)
    assert (await released)["cpusets_kept"] == []
    assert "all CPUs were restored" in (await _allocation(node))["suspended"]


async def test_uninstall_says_what_waits(node: Node) -> None:
    """If not, the containers that keep cpusets are returned; an answer still carries them."""
    async with _pushing(node, OLD) as runtime:
        await runtime.run(runtime.pod("db", "exclusive"), 2)
        await runtime.run(runtime.pod("web", kata=False))
        kept = (await node.ask("release"))["cpusets_kept"]
        assert {one["pod"] for one in kept} == {"shop/db", "shop/web"}
        await runtime.stop("c-web")
        assert runtime.cpus["c-db"] == ALL


# ---- what audits find out -------------------------------------------------------------------


async def test_a_failed_start_is_found_by_audits(node: Node, server: CriServer) -> None:
    """What the runtime lists as exited waits for its next try; what it does not know is released.

    Nothing is asked once nothing is in doubt.
    """
    async with _pushing(node, OLD, cri=str(server.path)) as runtime:
        for name in ("db", "made"):
            await runtime.make(runtime.pod(name, "exclusive"), 2)
        await runtime.make(runtime.pod("gone", "exclusive", kata=False), 2)
        server.states = {"c-db": EXITED, "c-made": CREATED}
        for _ in range(3):  # one that is being created is not listed yet
            await _audit(node)
        grants = {one["id"]: one["ended"] for one in (await _allocation(node))["grants"]}
        assert (grants.get("c-db"), grants.get("c-made")) == (True, False)
        assert "c-gone" not in grants
        await runtime.end("c-made")
        lists = server.lists
        await _audit(node)
        await _audit(node)
        assert server.lists == lists
