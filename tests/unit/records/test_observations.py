"""What sources told of a cpuset, kept beside the records."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import count

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.sandbox import Container, ReportedCpuset
from kata_pin.base.values import ContainerState, CpusetSource
from kata_pin.records.containers import Registry

APP = Container("app", "pod", cgroups_path="/kubepods/app", cpus=CpuSet([1]))


class Story:
    """A registry that is told one thing after another; each stamp is newer than the last."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._stamps = count(1)

    def message(self, source: str, cpus: set[int] | None, **changes: object) -> Container:
        """Take a hook's or NRI's record; return the container as it is then."""
        stamp = next(self._stamps)
        self.registry.record(self._of(source, cpus, stamp, **changes), stamp_ns=stamp, pid=1)
        return self.now

    def kata(self, cpus: set[int] | None) -> bool:
        """Take what persist.json says; return whether it made a difference."""
        return self.registry.adopt(self._of("persist.json", cpus, next(self._stamps)))

    @property
    def now(self) -> Container:
        """The container as passes see it."""
        (one,) = self.registry.containers("pod")
        return one

    @property
    def told(self) -> dict[str, tuple[str | None, int]]:
        """What each source told, and when it changed to that."""
        return {
            one.source.value: (None if one.cpus is None else str(one.cpus), one.recorded_ns)
            for one in self.now.reported
        }

    def _of(self, source: str, cpus: set[int] | None, stamp: int, **changes: object) -> Container:
        value = None if cpus is None else CpuSet(cpus)
        one = replace(APP, cpus=value, source=source, recorded_ns=stamp)
        return replace(one, **changes)


@pytest.fixture
def path(tmp_path: object) -> str:
    return f"{tmp_path}/registry.db"


@pytest.fixture
def story(path: str) -> Iterator[Story]:
    one = Story(Registry(path, boot_id="b"))
    yield one
    one.registry.close()


def test_an_update_outlives_later_hooks(story: Story) -> None:
    """The bundle never changes: poststart tells the old cpuset again, and is not believed."""
    story.message("hook:createRuntime", {1})
    assert story.kata({2})
    assert story.message("hook:poststart", {1}).cpus == CpuSet([2])
    assert story.message("spool:poststart", {3}).cpus == CpuSet([2])
    assert story.told == {"bundle": ("3", 4), "persist.json": ("2", 2)}


def test_repeating_makes_nothing_newer(story: Story) -> None:
    """persist.json is rewritten for other containers too: what it repeats is as old as before."""
    story.message("hook:createRuntime", {1})
    assert not story.kata({1})
    assert story.message("nri:StartContainer", {2}).cpus == CpuSet([2])
    assert not story.kata({1})
    assert story.now.cpus == CpuSet([2])
    assert story.kata({3})
    assert story.message("nri:Synchronize", {2}).cpus == CpuSet([3])


def test_an_update_is_new_though_it_repeats(story: Story) -> None:
    """NRI told 1 before; somebody else made it 2; an update back to 1 comes by NRI first."""
    story.message("nri:StartContainer", {1})
    assert story.kata({2})
    assert story.message("nri:PostUpdateContainer", {1}).cpus == CpuSet([1])


def test_no_cpuset_is_a_value_and_silence_is_none(story: Story) -> None:
    """NRI may tell that there is none; a record that says nothing of CPUs leaves all as it was."""
    story.message("hook:createRuntime", {1})
    silent = story.message("hook:poststart", None, cgroups_path="")
    assert silent.cpus == CpuSet([1])
    assert not story.kata(None)
    assert story.message("nri:PostUpdateContainer", None).cpus is None


def test_late_and_doubled_messages_change_nothing(story: Story) -> None:
    """A message that is older than the newest is not taken, nor is its cpuset."""
    story.message("hook:createRuntime", {1})
    story.message("nri:PostUpdateContainer", {2})
    late = replace(APP, cpus=CpuSet([7]), source="nri:StartContainer", recorded_ns=1)
    assert not story.registry.record(late, stamp_ns=1, pid=1)
    assert story.now.cpus == CpuSet([2])
    assert story.told == {"bundle": ("1", 1), "nri": ("2", 2)}


def test_a_container_that_is_over_has_no_rows(story: Story) -> None:
    """A later container of that id starts anew; rows are bounded by what lives."""
    story.message("hook:createRuntime", {1})
    story.kata({2})
    ended = story.message("hook:poststop", {1}, state=ContainerState.DELETED)
    assert (ended.reported, str(ended.cpus)) == ((), "1")
    assert story.message("hook:createRuntime", {3}).cpus == CpuSet([3])


def test_rows_go_with_the_sandbox(story: Story) -> None:
    """A sandbox that is forgotten leaves nothing."""
    story.message("hook:createRuntime", {1})
    story.registry.forget("pod")
    assert story.registry.row("SELECT count(*) FROM told") == (0,)


def test_a_restart_forgets_nothing(story: Story, path: str) -> None:
    """The live value is there before Kata's file is read again."""
    story.message("hook:createRuntime", {1})
    story.kata({2})
    story.registry.close()
    story.registry = Registry(path, boot_id="b")
    assert story.now.reported == (
        ReportedCpuset(CpusetSource.BUNDLE, CpuSet([1]), 1),
        ReportedCpuset(CpusetSource.KATA, CpuSet([2]), 2),
    )
    assert story.message("hook:poststart", {1}).cpus == CpuSet([2])


@pytest.mark.parametrize(
    "damage",
    [
        "DROP TABLE told; CREATE TABLE told (x TEXT)",
        "INSERT INTO told VALUES ('app', 'nobody', '1', 1)",
        "INSERT INTO told VALUES ('app', 'nri', 'one', 1)",
        "DROP TABLE told",
    ],
)
def test_a_table_that_cannot_be_used_is_made_anew(story: Story, path: str, damage: str) -> None:
    """Records stay; live sources tell their values again."""
    story.message("hook:createRuntime", {1})
    story.registry.close()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(damage)
    story.registry = Registry(path, boot_id="b")
    assert (story.now.cpus, story.now.reported) == (CpuSet([1]), ())
    assert story.kata({2})
    assert story.now.cpus == CpuSet([2])
