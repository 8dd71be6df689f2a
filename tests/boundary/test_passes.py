"""A pass over a sandbox's threads: what they are pinned to, at moments that hosts seldom show.

Containers come by hooks and Kata's files; threads are those of a tree of /proc on 16 CPUs.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node

ALL = "0-15"
AUDIT = {"affinity_s": 10, "deep_s": 60}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path, audit=AUDIT) as one:
        yield one


def _thread(shown: dict[str, Any], tid: int) -> dict[str, Any]:
    (found,) = [one for one in shown["threads"] if one["tid"] == tid]
    return dict(found)


async def _audit(node: Node, *, deep: bool = False) -> None:
    """Let an audit become due, and the pass that it asks for end."""
    await node.clock.move(61 if deep else 11)
    await node.pause()


async def test_pins_stand_when_the_hook_returns(node: Node) -> None:
    """Exclusive CPUs are paired, the rest gets the shared ones; new threads are pinned too."""
    vm = node.vm("p1", vcpus=3)
    assert await node.create(vm, "p1") == ""
    assert await node.create(vm, "c1", "4-5", exclusive=True) == ""
    assert await node.create(vm, "c2", "8") == ""
    assert vm.masks == {"v0": "8", "v1": "4", "v2": "5", "io": "8", "main": "8"}
    tid = vm.plug()
    node.kernel.connector.born(tid, vm.pid, vm.pid)
    await node.placed(vm, v3="8")
    await node.stopped(vm, "c1")
    await node.placed(vm, v0="8", v1="8", v2="8", v3="8", io="8", main="8")


async def test_a_thread_that_is_born_during_a_pass_is_pinned_by_it(node: Node) -> None:
    """Although no event tells of it, and it inherited what the main thread had before."""
    vm = node.vm("p1")
    await node.create(vm, "c1", "4")
    await _audit(node, deep=True)
    node.host.affinities[vm.pid] = {9}

    def bear(tid: int) -> None:
        if tid == vm.pid:
            vm.plug()

    node.kernel.before_set = bear
    await node.ask("reconcile")
    assert (vm.masks["v2"], vm.masks["main"]) == ("4", "4")


async def test_a_helper_that_exits_during_a_pass_is_not_the_vmm(node: Node) -> None:
    """virtiofsd, the shim or a vhost worker may go at any moment; the sandbox lives on."""
    vm = node.vm("p1")
    argv = ["virtiofsd", f"--shared-dir=/run/kata-containers/shared/sandboxes/{vm.id}/shared"]
    exe = "/usr/libexec/virtiofsd"
    helper = node.host.process("virtiofsd", exe=exe, argv=argv, ppid=vm.shim)

    def end(tid: int) -> None:
        if tid == vm.pid and helper in node.host.affinities:
            node.host.end(helper)

    node.kernel.before_set = end
    await node.create(vm, "c1", "4")
    assert helper not in node.host.affinities
    assert set(vm.masks.values()) == {"4"}
    assert (await node.shown(vm))["vmm"]["pid"] == vm.pid


async def test_what_the_kernel_narrows_is_set_once(node: Node) -> None:
    """A thread that gets a part of its CPUs is neither drift nor set in every round and pass."""
    vm = node.vm("p1")
    hidden = vm.iothread
    node.kernel.narrow[hidden] = {4}
    await node.create(vm, "c1", "4-5")
    for _ in range(2):  # the first one also reads what was written a moment ago
        await _audit(node, deep=True)
    set_before = node.kernel.tried.count(hidden)
    for _ in range(3):
        await _audit(node, deep=True)
        shown = await node.shown(vm)
        assert (_thread(shown, hidden)["state"], shown["state"]) == ("narrowed", "ok")
    assert node.kernel.tried.count(hidden) == set_before
    await node.hook("poststart", "c1", vm.pid)  # an event: the placement is asserted again
    await node.ask("reconcile")
    assert node.kernel.tried.count(hidden) > set_before


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EPERM])
async def test_a_refused_undo_is_tried_again(node: Node, refusal: int) -> None:
    """What could not be restored is remembered: the next release restores it."""
    vm = node.vm("p1")
    await node.create(vm, "c1", "4")
    node.kernel.refuse[vm.iothread] = refusal
    await node.ask("unpin", sandbox=vm.id)
    assert vm.masks == {"v0": ALL, "v1": ALL, "io": "4", "main": ALL}
    del node.kernel.refuse[vm.iothread]
    await node.ask("unpin", sandbox=vm.id)
    assert vm.masks["io"] == ALL
    await _audit(node, deep=True)
    assert set(vm.masks.values()) == {ALL}
    await node.ask("pin", sandbox=vm.id)
    assert set(vm.masks.values()) == {"4"}


async def test_an_undo_that_missed_new_threads_is_tried_again(node: Node) -> None:
    """A thread that is born in each round inherits a pin: what restores it is kept."""
    vm = node.vm("p1")
    await node.create(vm, "c1", "4")
    born: list[int] = []

    def bear(tid: int) -> None:
        if tid != (born[-1] if born else vm.pid):
            return
        born.append(node.host.thread(vm.pid, "worker"))
        node.host.affinities[born[-1]] = {4}

    node.kernel.before_set = bear
    await node.ask("unpin", sandbox=vm.id)
    node.kernel.before_set = lambda _: None
    assert {4} in [node.host.affinities[tid] for tid in born]
    await node.ask("unpin", sandbox=vm.id)
    assert {4} not in [node.host.affinities[tid] for tid in born]


async def test_masks_first_seen_come_back(node: Node) -> None:
    """Also after a daemon that was killed: the registry knows what each role had before."""
    vm = node.vm("p1")
    for tid in vm.vcpus.values():
        node.host.affinities[tid] = {2, 3}
    await node.create(vm, "c1", "4")
    await node.kill()
    await node.start()
    await node.ask("unpin", sandbox=vm.id)
    assert vm.masks == {"v0": "2-3", "v1": "2-3", "io": ALL, "main": ALL}


async def test_an_unconfined_thread_is_unconfined_again(tmp_path: Path) -> None:
    """A thread that had the whole cpuset of its cgroup gets what that has become meanwhile."""
    async with Node(tmp_path) as node:
        vm = node.vm("p1", cpuset="0-3")
        await node.create(vm, "c1", "2")
        node.host.cgroup(f"/kata_{vm.id}", ALL)
        await node.ask("unpin", sandbox=vm.id)
        assert set(vm.masks.values()) == {ALL}


async def test_drift_is_repaired_and_another_writer_is_yielded_to(node: Node) -> None:
    """A pin that is moved comes back with the audit; who moves it three times has its way a while.

    After the back-off, or an event, kata-pin applies its own again.
    """
    vm = node.vm("p1")
    await node.create(vm, "c1", "4")
    for _ in range(2):
        node.host.affinities[vm.iothread] = {9}
        await _audit(node)
        await node.placed(vm, io="4")
    node.host.affinities[vm.iothread] = {9}
    await _audit(node)
    assert vm.masks["io"] == "9"
    shown = await node.shown(vm)
    assert _thread(shown, vm.iothread)["state"] != "ok"
    (writer,) = shown["writers"]
    assert (writer["name"], writer["active"], writer["tids"]) == ("other", True, [vm.iothread])
    assert (writer["count"], writer["since_s"] > 0) == (3, True)
    for _ in range(40):
        await _audit(node)
    await node.placed(vm, io="4")


async def test_undo_of_another_writers_thread(node: Node) -> None:
    """A thread that kata-pin backs off from is restored by a later unpin, to what it had first."""
    vm = node.vm("p1")
    node.host.affinities[vm.iothread] = {2}
    await node.create(vm, "c1", "4")
    for _ in range(4):
        node.host.affinities[vm.iothread] = {9}
        await _audit(node)
    await node.ask("unpin", sandbox=vm.id)
    for _ in range(40):
        await _audit(node)
    await node.ask("unpin", sandbox=vm.id)
    assert vm.masks == {"v0": ALL, "v1": ALL, "io": "2", "main": ALL}


async def test_a_release_leaves_another_writers_thread_until_the_back_off_ends(node: Node) -> None:
    """The last mask is lost without an event about the sandbox: what restores it is kept."""
    node.host.checkpoint("static", "0-3")
    vm = node.vm("p1")
    node.host.affinities[vm.iothread] = {12}
    await node.create(vm, "c1")
    assert set(vm.masks.values()) == {"0-3"}
    for _ in range(3):
        node.host.affinities[vm.iothread] = {9}
        await _audit(node)
    node.host.checkpoint("none")
    await node.placed(vm, v0=ALL, v1=ALL, io="9", main=ALL)
    for _ in range(4):
        await _audit(node)
    await node.placed(vm, io="12")


async def test_a_cpuset_in_the_way(tmp_path: Path) -> None:
    """Where the VM's cgroup allows none of the wanted CPUs, the next step is taken and said."""
    async with Node(tmp_path) as node:
        vm = node.vm("p1", cpuset="0-3")
        await node.create(vm, "c1", "4-5", exclusive=True)
        assert set(vm.masks.values()) == {"0-3"}
        shown = _thread(await node.shown(vm), vm.pid)
        assert (shown["desired"], shown["expected"], shown["fallback"]) == (
            *("4-5", "0-3"),
            "cpuset",
        )


async def test_a_reload_puts_a_placement_in_force(node: Node) -> None:
    """Nothing else happens that would ask for a pass."""
    vm = node.vm("p1")
    await node.create(vm, "c1", "4-5", exclusive=True)
    await node.create(vm, "c2", "8-9")
    assert vm.masks == {"v0": "4", "v1": "5", "io": "8-9", "main": "8-9"}
    node.change(vcpus="float", overhead="sandbox")
    await node.ask("reload")
    await node.placed(vm, v0="4-5,8-9", v1="4-5,8-9", io="4-5,8-9", main="4-5,8-9")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mode: nonsense\nversion: 1\n", "mode"),
        ("version: 1\nmoed: act\n", "moed"),
        ("{{{", ""),
        ("version: 1\n", "runtime_dir: cannot change while the daemon runs"),
        (None, "no such file"),
    ],
)
async def test_a_wrong_configuration_changes_nothing(
    node: Node, text: str | None, said: str
) -> None:
    """A reload that cannot be is refused with its reason, and what held before still holds."""
    vm = node.vm("p1")
    await node.create(vm, "c1", "4")
    node.config.write_text(text) if text is not None else node.config.unlink()
    reply = await node.request("reload")
    assert "configuration not reloaded" in reply["error"]
    assert said in reply["error"]
    node.host.affinities[vm.pid] = {9}
    await node.ask("reconcile")
    assert set(vm.masks.values()) == {"4"}


async def test_audits_find_new_threads(tmp_path: Path) -> None:
    """Without process events; a shorter period counts from the reload on."""
    async with Node(tmp_path, new_threads="audit") as node:
        vm = node.vm("p1")
        await node.create(vm, "c1", "4")
        node.change(audit=AUDIT)
        await node.clock.move(5)
        await node.ask("reload")
        while (await node.shown(vm))["checked_s"] >= 5:  # until the pass of the reload has ended
            await node.pause()
        node.host.affinities[vm.pid] = {9}  # what is born inherits it
        vm.plug()
        await node.clock.move(11)
        await node.placed(vm, v2="4", main="4")
        assert _thread(await node.shown(vm), vm.vcpus[2])["state"] == "ok"


async def test_a_new_thread_where_others_should_be(node: Node) -> None:
    """It is not moved twice: the pass that knows its role sets it, if that is needed at all."""
    vm = node.vm("p1")
    node.change(overhead="9")
    await node.ask("reload")
    await node.create(vm, "c1", "8")
    assert vm.masks == {"v0": "8", "v1": "8", "io": "9", "main": "9"}
    tid = vm.plug()
    node.host.affinities[tid] = {8}
    node.kernel.connector.born(tid, vm.pid, vm.pid)
    await _found(node, vm, tid)
    assert vm.masks["v2"] == "8"
    assert tid not in node.kernel.tried


async def _found(node: Node, vm: Vm, tid: int) -> None:
    """Wait for the pass that a thread's birth asks for."""
    while tid not in {one["tid"] for one in (await node.shown(vm))["threads"]}:
        await node.pause()


async def test_observing_sets_nothing(tmp_path: Path) -> None:
    """mode: observe shows what would be set; a reload to act sets it."""
    async with Node(tmp_path, mode="observe") as node:
        vm = node.vm("p1")
        assert "only observes" in await node.create(vm, "c1", "4")
        assert set(vm.masks.values()) == {ALL}
        assert {one["desired"] for one in (await node.shown(vm))["threads"]} == {"4", None}
        tid = vm.plug()
        node.kernel.connector.born(tid, vm.pid, vm.pid)
        await _found(node, vm, tid)
        assert node.kernel.tried == []
        node.change(mode="act")
        await node.ask("reload")
        await node.placed(vm, v0="4", v2="4", main="4")


async def test_a_crowd_of_threads(node: Node) -> None:
    """Memory and time for one sandbox are bounded: threads are left out, and a pass has one round.

    The main thread is looked at in any case.
    """
    vm = node.vm("p1")
    node.kernel.refuse[vm.iothread] = errno.EINVAL
    await asyncio.to_thread(node.host.crowd, vm.pid, 8200)
    await node.create(vm, "c1", "4")
    node.kernel.tried.clear()
    await node.ask("reconcile", sandbox=vm.id)
    assert node.kernel.tried.count(vm.iothread) < 5  # the rounds of an ordinary pass
    shown = await node.shown(vm)
    assert vm.pid in {one["tid"] for one in shown["threads"]}
    (note,) = [note for note in shown["notes"] if note["code"] == "crowd"]
    assert note["text"].startswith("too many threads: ")


@pytest.mark.parametrize("unpinned", [False, True])
async def test_the_vmms_exit_ends_the_sandbox(node: Node, *, unpinned: bool) -> None:
    """Its records go with it, and the next VM of that id starts anew."""
    vm = node.vm("p1")
    await node.create(vm, "c1", "4")
    if unpinned:
        await node.ask("unpin", sandbox=vm.id)
    vm.end()
    await _audit(node, deep=True)
    await _gone(node, vm)
    again = node.vm("p1")
    await node.create(again, "c2", "5")
    assert set(again.masks.values()) == {"5"}
    assert {one["id"] for one in (await node.shown(again))["containers"]} == {"c2"}


async def _gone(node: Node, vm: Vm) -> None:
    while await node.shown(vm):
        await node.pause()


async def test_an_unpin_is_remembered(node: Node) -> None:
    """By the next daemon too; hooks of new containers are told, and pin nothing."""
    vm = node.vm("p1")
    await node.create(vm, "c1", "4")
    await node.ask("unpin", sandbox=vm.id)
    await node.stop()
    await node.start()
    assert "released" in await node.create(vm, "c2", "5")
    assert set(vm.masks.values()) == {ALL}
    await node.ask("pin", sandbox=vm.id)
    assert set(vm.masks.values()) == {"4-5"}


async def test_a_release_is_not_remembered(node: Node) -> None:
    """It is for an uninstall: until then containers are recorded only, the next daemon pins."""
    vm = node.vm("p1")
    await node.create(vm, "c1", "4")
    await node.ask("release")
    assert "unpinned the daemon only observes" in await node.create(vm, "c2", "5")
    assert set(vm.masks.values()) == {ALL}
    await node.stop()
    await node.start()
    await node.placed(vm, main="4-5")


async def test_nothing_moves_before_it_is_stored(tmp_path: Path) -> None:
    """What a thread had is written down before it is moved: where that fails nothing moves."""
    async with Node(tmp_path, mode="observe", audit=AUDIT) as node:
        vm = node.vm("p1")
        await node.create(vm, "c1", "4")
        with node.registry_refuses():
            node.change(mode="act")
            await node.ask("reload")
            assert not (await node.request("reconcile"))["ok"]
            assert set(vm.masks.values()) == {ALL}
            assert node.kernel.moves == []
        await node.ask("reconcile")
        assert set(vm.masks.values()) == {"4"}


async def test_a_request_names_a_sandbox_by_its_id_or_its_pod(node: Node) -> None:
    """Whole ones: parts are refused, and so the command asks for all names."""
    for one in ("p0", "p1"):
        await node.create(node.vm(one), f"{one}-c", "4")
    for known in ("p0", "p1"):
        for name in (known, f"shop/pod-{known}"):
            shown = (await node.ask("state", sandbox=name))["sandboxes"]
            assert [one["id"] for one in shown] == [known]
    for name in ("p", "pod-p0"):
        assert not (await node.request("state", sandbox=name))["ok"]


async def test_an_empty_name_means_all_sandboxes(node: Node) -> None:
    """As for every other command: not the first one, and no error where there is none."""
    for count in range(3):
        assert len((await node.ask("state", sandbox=""))["sandboxes"]) == count
        await node.create(node.vm(f"p{count}"), f"c{count}", "4")
