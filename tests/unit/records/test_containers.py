"""Containers are read from the file once, and again after each change."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import StateError
from kata_pin.base.sandbox import Container
from kata_pin.base.values import ContainerState
from kata_pin.records.containers import REPLACED, Registry


def _ids(registry: Registry, sandbox_id: str) -> list[str]:
    return [one.id for one in registry.containers(sandbox_id)]


def test_a_change_is_read_again_and_nothing_else(tmp_path: Path) -> None:
    """What a message, Kata's state or the end changes is seen; an unchanged sandbox is kept."""
    registry = Registry(str(tmp_path / "registry.db"), boot_id="b")
    registry.record(Container("c1", "s1", cpus=CpuSet([1]), source="hook:x"), stamp_ns=1, pid=1)
    registry.record(Container("c2", "s2"), stamp_ns=1, pid=1)
    before = registry.containers("s1"), registry.containers("s2")
    registry.record(Container("c1", "s1", cpus=CpuSet([2]), source="hook:x"), stamp_ns=2, pid=1)
    (changed,) = registry.containers("s1")
    assert changed.cpus == CpuSet([2])
    assert registry.containers("s2") is before[1]
    registry.adopt(Container("c3", "s2"))
    assert _ids(registry, "s2") == ["c2", "c3"]
    registry.forget("s2")
    assert _ids(registry, "s2") == []
    registry.close()


def test_a_container_that_another_sandbox_claims_leaves_the_first(tmp_path: Path) -> None:
    """It is never in two sandboxes."""
    registry = Registry(str(tmp_path / "registry.db"), boot_id="b")
    registry.record(Container("c1", "s1"), stamp_ns=1, pid=1)
    assert _ids(registry, "s1") == ["c1"]
    registry.record(Container("c1", "s2"), stamp_ns=2, pid=1)
    assert (_ids(registry, "s1"), _ids(registry, "s2")) == ([], ["c1"])
    registry.close()


def test_what_is_rolled_back_is_not_kept(tmp_path: Path) -> None:
    """A read within a transaction that fails later does not outlive it."""
    registry = Registry(str(tmp_path / "registry.db"), boot_id="b")
    with contextlib.suppress(StateError), registry.transaction():
        registry.record(Container("c1", "s1"), stamp_ns=1, pid=1)
        assert _ids(registry, "s1") == ["c1"]
        raise StateError("not stored")
    assert _ids(registry, "s1") == []
    registry.close()


def test_one_instance_of_a_container_runs(tmp_path: Path) -> None:
    """When a later one of its name is recorded, a former has ended, in whatever order they come."""
    registry = Registry(str(tmp_path / "registry.db"), boot_id="b")

    def record(container_id: str, at: int, name: str = "app", **fields: Any) -> None:
        one = Container(container_id, "s1", name=name, pod_uid="u1", recorded_ns=at)
        registry.record(replace(one, **fields), stamp_ns=at)

    record("first", 10)
    record("third", 30)
    record("side", 5, name="side")
    record("other", 5, pod_uid="u2")
    record("unnamed", 5, name="")
    record("unnamed-2", 6, name="")
    record("second", 20)  # spooled, and taken in late
    states = {one.id: one.state.counts for one in registry.containers("s1")}
    assert {name for name, counts in states.items() if not counts} == {"first", "second"}
    assert {one.note for one in registry.containers("s1") if not one.state.counts} == {REPLACED}
    record("third", 40, state=ContainerState.RUNNING)
    (third,) = [one for one in registry.containers("s1") if one.id == "third"]
    assert third.state is ContainerState.RUNNING
    registry.close()
