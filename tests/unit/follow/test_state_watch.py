"""Changes of files, seen through the real inotify."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from kata_pin.follow import files
from kata_pin.follow.files import FileChanges, StateWatch
from kata_pin.linux.inotify import Watches
from kata_pin.rights.calls import Calls
from tests.support.watched import World, descriptors, kernel_watches


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.make()
    return world


# ---- Kata's state ------------------------------------------------------------------------


async def test_a_write_is_told_once_it_is_whole(world: World) -> None:
    """No change is reported while persist.json is open for writing, only at its close."""
    path = world.sandbox("p1")
    async with world.watching():
        with path.open("w") as file:
            file.write('{"half":')
            file.flush()
            await world.nothing()
        assert (await world.told()) == FileChanges(sandboxes={"p1"})


async def test_a_sandbox_that_appears_and_one_that_vanishes_are_told(world: World) -> None:
    """A new folder, what is written into it, and its end."""
    async with world.watching():
        world.sandbox("p1")
        await world.told_of("p1")
        world.sandbox("p1", '{"more": 1}')
        await world.told_of("p1")
        shutil.rmtree(world.sbs / "p1")
        await world.told_of("p1")


async def test_a_sandbox_that_comes_back_is_found_again(world: World) -> None:
    """Its folder is another one with the same name."""
    async with world.watching():
        for _ in range(3):
            world.sandbox("p1")
            await world.told_of("p1")
            shutil.rmtree(world.sbs / "p1")
        world.sandbox("p1")
        await _settled(world)
        world.sandbox("p1", '{"more": 1}')
        assert (await world.told()).sandboxes == {"p1"}


async def _settled(world: World) -> None:
    """Take changes until a sentinel's: nothing older is left."""
    world.sandbox("sentinel")
    await world.told_of("sentinel")
    world.sandbox("sentinel2")
    await world.told_of("sentinel2")
    world.sandbox("sentinel2")
    while (await world.told()).sandboxes != {"sentinel2"}:
        pass


async def test_the_layout_of_runtime_rs(world: World) -> None:
    """<kata>/<sandbox>/state.json; other files there are ignored."""
    async with world.watching():
        folder = world.kata / "p1"
        folder.mkdir()
        assert (await world.told()).sandboxes == {"p1"}
        (folder / "shim-monitor.log").write_text("x")
        (folder / "state.json").write_text("{}")
        assert (await world.told()).sandboxes == {"p1"}
        await world.nothing()


async def test_replacing_by_rename_counts_too(world: World) -> None:
    """A Kata that would write persist.json atomically is followed as well."""
    path = world.sandbox("p1")
    async with world.watching():
        fresh = path.with_name("persist.json.new")
        fresh.write_text("{}")
        fresh.rename(path)
        assert (await world.told()).sandboxes == {"p1"}


async def test_everything_may_be_made_later(tmp_path: Path) -> None:
    """Neither /run/vc nor the kubelet's folder exist when watching begins."""
    world = World(tmp_path / "later")
    async with world.watching():
        world.make()
        world.sandbox("p1")
        await world.told_of("p1")
        world.sandbox("p1", '{"more": 1}')
        await world.told_of("p1")
        world.kubelet.write_text("{}")
        while not (await world.told()).kubelet:
            pass


async def test_a_place_that_is_removed_and_made_again(world: World) -> None:
    """The folder of all sandboxes goes, as when a tmpfs is emptied, and comes back."""
    world.sandbox("p1")
    async with world.watching():
        shutil.rmtree(world.sbs.parent)
        await world.told_of("p1")
        world.make()
        world.sandbox("p2")
        await world.told_of("p2")
        await _settled(world)
        world.sandbox("p2", '{"more": 1}')
        assert (await world.told()).sandboxes == {"p2"}


async def test_rearm_finds_a_place_whose_parent_was_replaced(world: World, tmp_path: Path) -> None:
    """No event reports that an ancestor was renamed; `rearm` finds it."""
    async with world.watching():
        (tmp_path / "vc").rename(tmp_path / "old")
        world.make()
        world.sandbox("p1")
        world.watch.rearm()
        world.sandbox("p1", '{"more": 1}')
        await world.told_of("p1")
        world.sandbox("p2")
        await world.told_of("p2")


async def test_dra_claims(world: World) -> None:
    """Specs that are written or removed are reported, also in a folder that comes later."""
    folder = world.claims
    folder.rmdir()
    async with world.watching():
        folder.mkdir()
        while not (await world.told()).claims:
            pass
        (folder / "spec.123.tmp").write_text("{")
        (folder / "spec.123.tmp").rename(folder / "claim.json")
        assert await world.told() == FileChanges(claims=True)
        (folder / "claim.json").unlink()
        assert await world.told() == FileChanges(claims=True)


async def test_two_places_that_are_one(tmp_path: Path) -> None:
    """The checkpoint is among the sandboxes of runtime-rs: each key gets its own events."""
    world = World(tmp_path)
    world.kubelet = world.kata / "cpu_manager_state"
    world.make()
    world.watch = StateWatch(
        vc=str(tmp_path / "vc"),
        kata=str(world.kata),
        kubelet=str(world.kubelet),
        claims=str(tmp_path / "cdi"),
    )
    async with world.watching():
        world.kubelet.write_text("{}")
        assert await world.told() == FileChanges(kubelet=True)
        (world.kata / "p1").mkdir()
        assert await world.told() == FileChanges(sandboxes={"p1"})


async def test_names_that_are_no_ids_are_ignored(world: World) -> None:
    """Neither listed nor reported: hidden folders, strange bytes, files."""
    (world.sbs / ".hidden").mkdir()
    (world.sbs / "a file").write_text("")
    async with world.watching():
        before = world.watch.watched
        assert before == len({world.sbs, world.kata, world.kubelet.parent, world.claims})
        (world.sbs / "..x").mkdir()
        os.mkdir(os.fsencode(world.sbs) + b"/\xff\xfe")
        (world.sbs / "sp ace").mkdir()
        (world.sbs / ("n" * 200)).mkdir()
        await world.nothing()
        assert world.watch.watched == before + 1  # the sentinel


async def test_a_symlink_is_not_followed(world: World, tmp_path: Path) -> None:
    """A sandbox that is a symlink is not watched, nor what it points to."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (world.sbs / "first").symlink_to(elsewhere)
    async with world.watching():
        before = world.watch.watched
        (world.sbs / "second").symlink_to(elsewhere)
        (elsewhere / "persist.json").write_text("{}")
        await world.nothing()
        assert world.watch.watched == before + 1


# ---- the kubelet's checkpoint ------------------------------------------------------------


async def test_the_checkpoint_is_told_of(world: World) -> None:
    """Replaced by rename, rewritten, removed: each once; other files there are not."""
    async with world.watching():
        for step in ("rename", "write", "unlink"):
            (world.kubelet.parent / "memory_manager_state").write_text("{}")
            if step == "rename":
                fresh = world.kubelet.with_suffix(".tmp")
                fresh.write_text("{}")
                fresh.rename(world.kubelet)
            elif step == "write":
                world.kubelet.write_text("{}")
            else:
                world.kubelet.unlink()
            assert await world.told() == FileChanges(kubelet=True)
        await world.nothing()


# ---- cpusets -----------------------------------------------------------------------------


async def test_a_written_cpuset_is_told_of_each_sandbox_below(world: World) -> None:
    """A pod's cgroup holds two sandboxes; one has a cgroup of its own too."""
    pod, own = world.cgroup("pod"), world.cgroup("own")
    async with world.watching():
        world.watch.watch_cpusets("p1", [str(pod), str(own)])
        world.watch.watch_cpusets("p2", [str(pod)])
        (pod / "cpuset.cpus").write_text("0-1")
        assert await world.told() == FileChanges(cpusets={"p1", "p2"})
        (own / "cpuset.cpus").write_text("0-1")
        assert await world.told() == FileChanges(cpusets={"p1"})
        world.watch.watch_cpusets("p1", [])
        (pod / "cpuset.cpus").write_text("0")
        assert await world.told() == FileChanges(cpusets={"p2"})
        (own / "cpuset.cpus").write_text("0")
        await world.nothing()


async def test_cpusets_named_before_the_watch_began(world: World) -> None:
    """They are watched as soon as watching begins."""
    own = world.cgroup("own")
    world.watch.watch_cpusets("p1", [str(own)])
    async with world.watching():
        (own / "cpuset.cpus").write_text("0-1")
        assert await world.told() == FileChanges(cpusets={"p1"})


async def test_a_cgroup_that_is_made_again(world: World) -> None:
    """It has the same name and is another file."""
    own = world.cgroup("own")
    async with world.watching():
        world.watch.watch_cpusets("p1", [str(own)])
        before = world.watch.watched
        shutil.rmtree(own)
        world.cgroup("own")
        world.watch.rearm()
        assert world.watch.watched == before
        (own / "cpuset.cpus").write_text("0-1")
        while not (await world.told()).cpusets:
            pass


# ---- bounds ------------------------------------------------------------------------------


async def test_nothing_leaks_as_sandboxes_come_and_go(world: World) -> None:
    """After many of them there are as many watches, in the kernel too, as before; at the end none.

    Their cgroups go as well, of which inotify tells nothing.
    """
    fds, watches = descriptors(), kernel_watches()
    async with world.watching():
        at_rest = world.watch.watched
        for number in range(50):
            name = f"p{number}"
            world.sandbox(name)
            cgroup = world.cgroup(name)
            await world.told_of(name)
            world.watch.watch_cpusets(name, [str(cgroup)])
            assert world.watch.watched == at_rest + 2
            world.watch.watch_cpusets(name, [])
            assert world.watch.watched == at_rest + 1
            shutil.rmtree(cgroup)
            shutil.rmtree(world.sbs / name)
            while world.watch.watched != at_rest:
                await world.told()
        assert kernel_watches() == watches + len(
            {world.sbs, world.kata, world.kubelet.parent, world.claims}
        )
        assert world.watch.watched == at_rest
    assert (descriptors(), kernel_watches(), world.watch.watched) == (fds, watches, 0)


async def test_a_flood_on_one_file_is_told_in_few_pieces(world: World) -> None:
    """A thousand writes between two reads are one change: the kernel merges equal events."""
    path = world.sandbox("p1")
    async with world.watching():
        for _ in range(1000):
            path.write_text("{}")
        assert (await world.told()).sandboxes == {"p1"}
        await world.nothing()


async def test_the_number_of_watches_is_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sandboxes beyond the limit are reported once, then left to audits; logged once."""
    monkeypatch.setattr(files, "Watches", lambda calls: Watches(limit=5, calls=calls))
    for number in range(20):
        world.sandbox(f"p{number}")
    async with world.watching():
        assert world.watch.watched == 5
        world.sandbox("late")
        assert "late" in (await world.told()).sandboxes
    assert caplog.text.count("cannot watch all files") == 1


async def test_a_kernel_without_room_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After EMFILE watching starts once an instance is free, and everything is reported."""
    tries: list[float] = []

    def scarce(calls: Calls) -> Watches:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return Watches(calls=calls)

    monkeypatch.setattr(files, "Watches", scarce)
    monkeypatch.setattr(files, "PAUSES_S", (0.01,))
    async with world.watching():
        assert len(tries) == 2
