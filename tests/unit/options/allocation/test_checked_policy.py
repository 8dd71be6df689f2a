"""Policies of other packages that fail or decide nonsense harm no container, and it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import (
    AllocState,
    AtCreation,
    Decision,
    Device,
    Grant,
    RunningContainer,
)
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import Note
from kata_pin.base.sandbox import Container
from kata_pin.base.values import CpuClass
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.options.allocation import option
from kata_pin.options.allocation.adjustments import HostDevices
from kata_pin.options.allocation.allocator import Allocator
from kata_pin.options.allocation.policies import create
from kata_pin.options.allocation.policy import Policy
from kata_pin.records.containers import Registry
from tests.support.allotted import Host, Moves, core, looking, request, settings
from tests.support.world import cpus, flat

Method = Callable[..., Any]


class World:
    """An allocator whose policy is another package's: ours, with some methods replaced."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.host = Host()
        self.chosen = settings()
        self.ours = create("annotation", flat(8), self.chosen)
        self.theirs = SimpleNamespace(
            **{
                name: getattr(self.ours, name)
                for name in ("allocate", "change", "release", "reconcile", "decline")
            }
        )
        self.moves = Moves()
        self.allocator = self.make()

    def make(self) -> Allocator:
        """Return an allocator that has begun."""
        parts = core(self.registry, self.host)
        parts.live.replace(replace(parts.live.now, alloc=self.chosen))
        one = Allocator(parts, self.moves, lambda *_: cast("Policy", self.theirs))
        one.follow_host()
        return one

    def break_down(self, method: Method, *names: str) -> None:
        """Replace methods of the policy."""
        for name in names:
            setattr(self.theirs, name, method)

    @property
    def complaints(self) -> list[str]:
        return [note.text for note in self.allocator.notes if note.code == "alloc-policy"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    registry = Registry(str(tmp_path / "registry.db"), boot_id="b")
    yield World(registry)
    registry.close()


def _raises(*_: object) -> Decision:
    raise ZeroDivisionError("by zero")


def _exits(*_: object) -> Decision:
    raise SystemExit(3)


def _nothing(*_: object) -> None:
    return None


def _loses_everybody(state: AllocState, _: object) -> Decision:
    return Decision(replace(state, grants={}))


def _gives_all(state: AllocState, one: Any) -> Decision:
    grants = {name: replace(had, exclusive=state.cpus) for name, had in state.grants.items()}
    return Decision(replace(state, grants=grants))


BAD = (_raises, _exits, _nothing, _loses_everybody, _gives_all)


@pytest.mark.parametrize("bad", BAD)
def test_a_new_container_has_the_shared_pool(world: World, bad: Method) -> None:
    """Whatever the policy does: it has a stored grant, and all others are unchanged."""
    world.allocator.admit(request("db", "exclusive", cpus=2))
    before = world.allocator.state
    world.break_down(bad, "allocate")
    decision = world.allocator.admit(request("web", "exclusive", cpus=1))
    grant = decision.state.grants["c-web"]
    assert (grant.cpu_class, grant.cpus) == (CpuClass.NONE, before.shared)
    assert decision.state.grants["c-db"] == before.grants["c-db"]
    assert looking(world.registry, world.host).state == world.allocator.state
    assert len(world.complaints) == 1
    assert "policy 'annotation' fails: " in world.complaints[0]
    assert grant.reasons == (world.complaints[0],)


def test_its_options_are_its_own(world: World) -> None:
    """Only policies of ours take none but those of the kubelet's static policy."""
    world.chosen = settings(options={"depth": "3"})
    world.allocator = world.make()
    grant = world.allocator.admit(request("db", "exclusive", cpus=2)).state.grants["c-db"]
    assert (world.allocator.problem, len(grant.exclusive), world.complaints) == ("", 2, [])


def test_a_device_is_what_its_path_says() -> None:
    """By the kernel's names: numbers of another device would be another device."""
    null = Device("/dev/null", "c", 1, 3)
    grant = Grant(request("db"), "x", creation=AtCreation(devices=(null,)))
    host = HostDevices(HOST)
    assert host.wrong(None) == host.wrong(grant) == ""

    def said(**fields: Any) -> str:
        creation = AtCreation(devices=(replace(null, **fields),))
        return host.wrong(replace(grant, creation=creation))

    assert "the device /dev/null as c 1:5, which is /dev/zero" in said(minor=5)
    assert "which has no name in sysfs" in said(major=4000)
    assert "which has no name in sysfs" in said(kind="b", major=4000)


def test_a_policy_cannot_add_another_device(world: World) -> None:
    """The whole decision is discarded, and the note says why."""
    world.chosen = settings(devices=("/dev/null",))
    world.allocator = world.make()

    def with_disk(state: AllocState, one: Any) -> Decision:
        decision = world.ours.allocate(state, one)
        grant = decision.state.grants[one.container_id]
        disk = AtCreation(devices=(Device("/dev/null", "c", 1, 1),))
        more = replace(grant, creation=disk)
        return Decision(decision.state.with_grant(more), (more,))

    world.break_down(with_disk, "allocate")
    asked = request("web")
    asked = replace(asked, pod=replace(asked.pod, kata=False, sandbox_id=""))
    decision = world.allocator.admit(asked)
    assert not decision.state.grants["c-web"].creation
    assert "as c 1:1, which" in world.complaints[0]


def test_vfio_needs_a_port_in_the_vm(tmp_path: Path) -> None:
    """Kata adds a device to a running VM only if its configuration says where."""
    (tmp_path / "sys/dev/char/240:3").mkdir(parents=True)
    (tmp_path / "sys/dev/char/240:3/uevent").write_text("DEVNAME=vfio/7\n")
    vfio = AtCreation(devices=(Device("/dev/vfio/7", "c", 240, 3),))
    grant = Grant(request("db"), "x", creation=vfio)
    kata = replace(grant, request=replace(grant.request, pod=replace(grant.request.pod, kata=True)))
    runc = replace(
        grant, request=replace(grant.request, pod=replace(grant.request.pod, kata=False))
    )
    host = HostDevices(HostRoot(str(tmp_path)))
    assert "no configuration of Kata has hot_plug_vfio" in host.wrong(kata)
    assert replace(host, hot_plug=True).wrong(kata) == host.wrong(runc) == ""


@pytest.mark.parametrize("bad", BAD)
def test_a_running_container_keeps_what_it_has(world: World, bad: Method) -> None:
    """A change that cannot be is none, in an event and in a pass."""
    world.allocator.admit(request("db", "exclusive", cpus=2))
    before = world.allocator.state
    world.break_down(bad, "change", "reconcile")
    world.allocator.change(request("db", "exclusive", cpus=3), "test")
    world.allocator.set_orders({"shop/db": CpuClass.SHARE})
    world.allocator.reconcile([RunningContainer(request("db", "exclusive", cpus=2), cpus("1"))])
    assert world.allocator.state == before
    found = Container("c-new", "s-new", pod_name="new", pod_namespace="shop", pod_uid="uid-new")
    assert option.view(world.allocator, (found,)).containers[0].cpus == before.shared
    assert world.complaints


@pytest.mark.parametrize("bad", [_raises, _exits, _nothing, lambda state, _: Decision(state)])
def test_what_is_over_is_given_back(world: World, bad: Method) -> None:
    """A policy that cannot release anything does not keep CPUs for ever."""
    world.allocator.admit(request("db", "exclusive", cpus=2))
    world.break_down(bad, "release")
    world.allocator.release_sandbox("s-db")
    assert (world.allocator.state.grants, world.allocator.state.exclusive) == ({}, CpuSet())
    assert world.complaints


@pytest.mark.parametrize("bad", [_raises, lambda state, _: Decision(state)])
def test_who_is_gone_is_given_back_by_what_runs(world: World, bad: Method) -> None:
    """A policy that cannot reconcile keeps no CPUs of containers that run no more."""
    for one in (request("db", "exclusive", cpus=2), request("old", "exclusive", cpus=2)):
        world.allocator.admit(one)
    kept = world.allocator.state.grants["c-db"]
    world.break_down(bad, "reconcile")
    world.allocator.reconcile([RunningContainer(kept.request, kept.cpus)])
    assert world.allocator.state.get("c-db") == kept
    assert world.allocator.state.exclusive == kept.exclusive
    assert [one for one in world.allocator.state.grants if "old" in one] == []
    assert looking(world.registry, world.host).state == world.allocator.state
    assert world.complaints


def test_a_note_that_cannot_be_said(world: World) -> None:
    """It is looked at before anything is stored: else an event would fail after that."""

    def notes(state: AllocState, one: Any) -> Decision:
        decision = world.ours.allocate(state, one)
        return replace(decision, notes=(Note(["alloc"], ["x"]),))  # type: ignore[arg-type]

    world.break_down(notes, "allocate")
    assert world.allocator.admit(request("db", "exclusive", cpus=2)).state.get("c-db") is not None
    assert world.allocator.state.exclusive == CpuSet()
    assert world.complaints


def test_a_policy_that_never_answers(world: World) -> None:
    """The daemon starts, no container gets CPUs, and the first complaint is not repeated."""
    world.break_down(_raises, "allocate", "change", "release", "reconcile", "decline")
    world.registry.run("DELETE FROM alloc")
    world.allocator = world.make()
    for _ in range(3):
        assert world.allocator.admit(request("db", "exclusive", cpus=2)).state == AllocState()
    assert world.complaints == ["policy 'annotation' fails: ZeroDivisionError: by zero"]


def test_a_policy_that_refuses_what_runs(world: World) -> None:
    """Only a creation can be refused."""

    def refusing(state: AllocState, one: Any) -> Decision:
        decision = world.ours.allocate(state, request("much", "exclusive", cpus=64))
        assert decision.refused is not None
        return Decision(state, refused=replace(decision.refused, strict=True))

    world.break_down(refusing, "allocate", "change")
    refused = world.allocator.admit(request("db")).refused
    assert refused is not None
    assert refused.strict
    decision = world.allocator.change(request("db"), "test")
    assert (decision.refused, list(decision.state.grants)) == (None, ["c-db"])


def test_a_long_complaint_is_cut(world: World) -> None:
    """What a policy raises is text of others, in the log and in the registry."""

    def talks(*_: object) -> Decision:
        raise ValueError("x" * 100_000)

    world.break_down(talks, "allocate")
    world.allocator.admit(request("db"))
    assert len(world.complaints[0]) == 200
