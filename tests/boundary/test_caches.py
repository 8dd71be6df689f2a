"""Groups of resctrl that hold sandboxes' threads, over a tree with the kernel's rules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node
from tests.support.resctrl_tree import ResctrlCalls, ResctrlTree

AUDIT = {"affinity_s": 10, "deep_s": 60}
AGAIN_S = 301
FAST = "L3:0=ff0;1=ff0"


class Caches:
    """A node with resctrl."""

    def __init__(self, folder: Path, *, rmids: int = 8, **resctrl: Any) -> None:
        settings = {"enabled": True, **resctrl}
        self.node = Node(folder, audit=AUDIT, resctrl=settings)
        self.tree = ResctrlTree(self.node.host.folder, rmids=rmids)
        self.node.kernel.caches = ResctrlCalls(self.tree, settings.get("classes", {}))

    async def __aenter__(self) -> Self:
        await self.node.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.node.__aexit__(None, None, None)

    async def run(self, name: str = "p1") -> Vm:
        """Have a sandbox with a container."""
        vm = self.node.vm(name)
        self.tree.inherit(vm.shim, *self.node.host.tids(vm.pid))
        await self.node.create(vm, f"c-{name}", "4")
        return vm

    async def joined(self, vm: Vm, class_name: str = "", *, but: int = 0) -> None:
        """Wait until a sandbox's threads are in its group, but for one."""
        base = f"kata-pin-{class_name}/" if class_name else ""
        group, wanted = f"{base}mon_groups/kata-pin-{vm.id}", set(self.node.host.tids(vm.pid))
        await self.node.until(
            lambda: wanted - {but} == self.tree.members(group) - {vm.shim},
            f"{wanted} in {group}: {self.tree.home}",
        )

    async def audits(self, seconds: float = 11) -> None:
        """Have an audit, and the pass that it asks for."""
        await self.node.clock.move(seconds)
        for _ in range(8):
            await self.node.pause()

    async def problem(self, vm: Vm) -> str:
        """Return what is wrong with a sandbox's group."""
        return str((await self.node.shown(vm))["cache"]["problem"])

    def groups(self) -> set[str]:
        """Return the groups that kata-pin made."""
        found = {one for one in self.tree.top.rglob("kata-pin-*") if one.is_dir()}
        return {str(one.relative_to(self.tree.top)) for one in found}

    async def left(self, groups: set[str]) -> None:
        """Wait until these groups are left."""
        await self.node.until(lambda: self.groups() == groups, f"{groups} are left")

    def made(self) -> int:
        """Return how often a group was made, or tried to."""
        return sum(verb == "mkdir" for verb, _ in self.tree.calls)


async def test_every_thread_is_in_the_group(tmp_path: Path) -> None:
    """Nothing is written for one that inherits it; one that strayed is put back by an audit."""
    async with Caches(tmp_path) as caches:
        vm = await caches.run()
        await caches.joined(vm)
        written = len(caches.tree.calls)
        tid = vm.plug()
        caches.tree.inherit(tid, of=vm.pid)
        caches.node.kernel.connector.born(tid, vm.pid, vm.pid)
        await caches.node.placed(vm, v2="4")
        assert len(caches.tree.calls) == written
        caches.tree.home[tid] = caches.tree.top
        caches.tree.inherit()
        await caches.audits()
        await caches.joined(vm)
        assert await caches.problem(vm) == ""


async def test_no_free_monitor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One attempt and one message, until minutes have passed."""
    async with Caches(tmp_path, rmids=1) as caches:
        vm = await caches.run()
        for _ in range(4):
            await caches.audits()
        assert (caches.made(), caplog.text.count("RMID")) == (1, 1)
        assert "RMID" in await caches.problem(vm)
        caches.tree.rmids = 1
        await caches.audits(AGAIN_S)
        await caches.node.ask("reconcile")
        await caches.joined(vm)


@pytest.mark.parametrize("how", ["ended", "unpin", "observe", "off"])
async def test_what_removes_a_group(tmp_path: Path, how: str) -> None:
    """The end of a sandbox or of its pins; groups of others stay, whatever their names."""
    async with Caches(tmp_path) as caches:
        vm, node = await caches.run(), caches.node
        await caches.joined(vm)
        for name in ("theirs", "kata-pin-foreign"):
            caches.tree.mkdir(str(caches.tree.top / "mon_groups" / name))
        if how == "ended":
            vm.end()
            node.kernel.connector.exited(vm.pid, vm.pid)
        elif how == "unpin":
            await node.ask("unpin", sandbox=vm.id)
        elif how == "observe":
            node.change(mode="observe")
            await node.ask("reload")
        else:
            await node.stop()
            node.change(resctrl={"enabled": False})
            await node.start()
        await node.until(lambda: node.rows("cache_groups") == [], "no group is recorded")
        assert caches.groups() == {"mon_groups/kata-pin-foreign"}
        assert (caches.tree.top / "mon_groups/theirs").exists()


async def test_what_a_killed_daemon_left(tmp_path: Path) -> None:
    """The next one removes groups of sandboxes that ended meanwhile, and keeps the others."""
    async with Caches(tmp_path) as caches:
        vm, other = await caches.run(), await caches.run("p2")
        await caches.joined(vm)
        await caches.joined(other)
        await caches.node.kill()
        other.end()
        await caches.node.start()
        await caches.node.until(lambda: len(caches.groups()) == 1, "p2's group is removed")
        await caches.joined(vm)
        removed = [path[-2:] for verb, path in caches.tree.calls if verb == "rmdir"]
        assert removed == ["p2"]


async def test_a_class_stays_until_its_last_sandbox_has_ended(tmp_path: Path) -> None:
    """Its control group has the schemata; removing it would take the other's caches away."""
    rules = [{"class": "fast", "handler": "other"}, {"class": "fast", "namespace": "sh*"}]
    async with Caches(tmp_path, classes={"fast": FAST}, rules=rules) as caches:
        first, second = await caches.run(), await caches.run("p2")
        for vm in (first, second):
            await caches.joined(vm, "fast")
        assert (caches.tree.top / "kata-pin-fast/schemata").read_text() == f"{FAST}\n"
        assert (await caches.node.shown(first))["cache"]["class_name"] == "fast"
        for vm, left in ((first, {"kata-pin-fast/mon_groups/kata-pin-p2"}), (second, set())):
            vm.end()
            caches.node.kernel.connector.exited(vm.pid, vm.pid)
            await caches.left(left | {"kata-pin-fast"} if left else left)


async def test_schemata_that_the_kernel_refuses(tmp_path: Path) -> None:
    """Its own reason is shown, and no half-made class stays."""
    classes, rules = {"wrong": "L3:0=f000"}, [{"class": "wrong"}]
    async with Caches(tmp_path, classes=classes, rules=rules) as caches:
        vm = await caches.run()
        await caches.audits()
        assert await caches.problem(vm) == "Mask out of range"
        assert (caches.groups(), caches.node.rows("cache_groups")) == (set(), [])


async def test_threads_in_a_control_group_of_others_stay_there(tmp_path: Path) -> None:
    """Without a class of ours nothing is taken out of a group that another program made."""
    async with Caches(tmp_path) as caches:
        vm = caches.node.vm("p1")
        caches.tree.inherit(vm.shim, *caches.node.host.tids(vm.pid))
        caches.tree.mkdir(str(caches.tree.top / "theirs"))
        caches.tree.home[vm.iothread] = caches.tree.top / "theirs"
        await caches.node.create(vm, "c1", "4")
        await caches.joined(vm, but=vm.iothread)
        assert caches.tree.members("theirs") == {vm.iothread}
        assert "1 of 4 threads stay outside: another program has" in await caches.problem(vm)


async def test_another_program_that_moves_threads_is_named(tmp_path: Path) -> None:
    """And not fought: after a few returns nothing is moved for minutes."""
    async with Caches(tmp_path) as caches:
        vm = await caches.run()
        await caches.joined(vm)
        written = 0
        for _ in range(6):
            caches.tree.home[vm.iothread] = caches.tree.top
            caches.tree.inherit()
            written = len(caches.tree.calls)
            await caches.audits()
        assert "another program moves 1 thread out" in await caches.problem(vm)
        assert len(caches.tree.calls) == written


async def test_a_group_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """It is said first; minutes later there is a new one."""
    async with Caches(tmp_path) as caches:
        vm = await caches.run()
        await caches.joined(vm)
        caches.tree.rmdir(str(caches.tree.top / "mon_groups/kata-pin-p1"))
        await caches.audits()
        assert "No such file" in await caches.problem(vm)
        await caches.audits(AGAIN_S)
        await caches.joined(vm)


@pytest.mark.parametrize(
    ("gone", "words"),
    [("info/L3_MON", "not monitor"), ("schemata", "not mounted"), (".", "no resctrl")],
)
async def test_without_resctrl(tmp_path: Path, gone: str, words: str) -> None:
    """What is missing is named: the kernel's support, the mount, or monitoring."""
    caches = Caches(tmp_path)
    os.rename(caches.tree.top / gone, tmp_path / "elsewhere")
    async with caches:
        vm = caches.node.vm("p1")
        await caches.node.create(vm, "c1", "4")
        assert words in await caches.problem(vm)
        assert caches.made() == 0
