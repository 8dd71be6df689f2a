"""What becomes of NRI's events: records in a real registry, marks, and pods that are not Kata's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.daemon.intake.nri_events import NriIntake
from kata_pin.daemon.reconcile.kata_pinning import KataPinningReader
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.store.containers import Registry
from kata_pin.errors import VmmError
from kata_pin.host.process import ProcessIndex
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.sandbox import Container, ContainerKind, ContainerState
from kata_pin.vmm.find import VmmFinder
from kata_pin.wire.nri.messages import Event, EventKind, Pod, PodContainer, Snapshot
from kata_pin.wire.oci import CpuResources
from tests.support.vmmhost import no_survey

QEMU, PAUSE = 100, 200
POD = Pod("p1", name="web", namespace="shop", uid="u1", handler="kata", pid=QEMU)
RUNC = Pod("r1", name="other", pid=PAUSE)


class World:
    """The parts that NRI's intake works with: a real registry, and what else there is, played."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.vmms = {"p1": QEMU}
        self.looks = 0
        self.known: set[str] = set()
        self.marks: list[tuple[str, str]] = []
        self.awaited: list[tuple[str, int]] = []
        finder = SimpleNamespace(is_kata=self._is_kata, find=self._find, sandboxes=self._running)
        index = SimpleNamespace(refresh=lambda: None)
        self.annotations: dict[str, dict[str, str]] = {}
        pins = SimpleNamespace(take_annotations=self.annotations.__setitem__)
        sandboxes = SimpleNamespace(
            vmms={}, cache=self._cache, mark=self._mark, settled=self._settled
        )
        self.intake = NriIntake(
            registry,
            cast("VmmFinder", finder),
            cast("ProcessIndex", index),
            cast("KataPinningReader", pins),
            cast("Sandboxes", sandboxes),
            no_survey(),
        )
        self._stamp = 1000

    def tell(self, kind: EventKind, pod: Pod = POD, container: Any = None, at: int = 0) -> int:
        """Tell of an event, later than all before unless it says when."""
        self._stamp += 1
        return self.intake.take(Event(kind, pod, container), at or self._stamp)

    def state(self, container: str) -> ContainerState:
        record = self.registry.container(container)
        assert record is not None
        return record.state

    def _is_kata(self, pid: int) -> bool | None:
        return pid in self.vmms.values()

    def _cache(self, sandbox_id: str) -> object | None:
        return self if sandbox_id in self.known else None

    def _find(self, sandbox_id: str) -> int:
        self.looks += 1
        if sandbox_id not in self.vmms:
            raise VmmError("none")
        return self.vmms[sandbox_id]

    def _running(self, _known: object) -> dict[str, int]:
        return self.vmms

    def _mark(self, sandbox_id: str, reason: str) -> int:
        self.marks.append((sandbox_id, reason))
        return len(self.marks)

    async def _settled(self, sandbox_id: str, ticket: int) -> None:
        self.awaited.append((sandbox_id, ticket))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    registry = Registry(str(tmp_path / "registry.db"), boot_id="b")
    yield World(registry)
    registry.close()


def _app(cpus: str = "2-3", name: str = "c1", **fields: Any) -> PodContainer:
    return PodContainer(
        name,
        "p1",
        name=f"app-{name}",
        cgroups_path=f"/pods/{name}",
        cpu=CpuResources(cpus=cpus),
        **fields,
    )


async def test_annotations_are_passed_on(world: World) -> None:
    """What a pod's annotations say of Kata's own pinning is for whoever asks; events and all."""
    world.tell(EventKind.RUN_POD_SANDBOX, Pod("p1", pid=QEMU, annotations={"k": "v"}))
    assert world.annotations == {"p1": {"k": "v"}}
    pod = Pod("p1", pid=QEMU, annotations={"k": "w"})
    await world.intake.rebuild(Snapshot((pod,), ()), 5000)
    assert world.annotations == {"p1": {"k": "w"}}


async def test_a_life(world: World) -> None:
    """Each event of a container's life changes its state, and asks for a pass by its name."""
    world.tell(EventKind.RUN_POD_SANDBOX)
    ticket = world.tell(EventKind.START_CONTAINER, container=_app())
    await world.intake.placed(Event(EventKind.START_CONTAINER, POD, _app()), ticket)
    assert world.awaited == [("p1", ticket)]
    assert world.state("c1") is ContainerState.CREATED
    world.tell(EventKind.POST_START_CONTAINER, container=_app())
    assert world.state("c1") is ContainerState.RUNNING
    updated = _app("4", state=ContainerState.RUNNING)
    world.tell(EventKind.POST_UPDATE_CONTAINER, container=updated)
    record = world.registry.container("c1")
    assert record is not None
    assert (record.cpus, record.pid_hint) == (CpuSet([4]), QEMU)
    assert record.state is ContainerState.RUNNING  # as the event itself says
    world.tell(EventKind.STOP_CONTAINER, container=updated)
    assert world.state("c1") is ContainerState.STOPPED
    world.tell(EventKind.REMOVE_CONTAINER, container=updated)
    assert world.state("c1") is ContainerState.DELETED
    assert [reason for _, reason in world.marks] == [
        *("nri:RunPodSandbox", "nri:StartContainer", "nri:PostStartContainer"),
        *("nri:PostUpdateContainer", "nri:StopContainer", "nri:RemoveContainer"),
    ]


def test_the_end_of_a_pod_ends_its_containers(world: World) -> None:
    """StopPodSandbox and RemovePodSandbox count for every container of the pod, and no other."""
    world.tell(EventKind.RUN_POD_SANDBOX)
    world.tell(EventKind.START_CONTAINER, container=_app())
    world.registry.adopt(Container("x", "p2", state=ContainerState.RUNNING))
    world.tell(EventKind.STOP_POD_SANDBOX)
    assert {world.state(one) for one in ("p1", "c1")} == {ContainerState.STOPPED}
    world.tell(EventKind.REMOVE_POD_SANDBOX)
    assert {world.state(one) for one in ("p1", "c1")} == {ContainerState.DELETED}
    assert world.state("x") is ContainerState.RUNNING


def test_one_container_ends_alone(world: World) -> None:
    """The end of a container is not that of its neighbours."""
    for name in ("c1", "c2"):
        world.tell(EventKind.START_CONTAINER, container=_app(name=name))
    world.tell(EventKind.STOP_CONTAINER, container=_app(name="c1"))
    assert [world.state(one) for one in ("c1", "c2")] == [
        ContainerState.STOPPED,
        ContainerState.CREATED,
    ]


@pytest.mark.parametrize("late", [EventKind.POST_START_CONTAINER, EventKind.POST_UPDATE_CONTAINER])
@pytest.mark.parametrize("end", [EventKind.STOP_CONTAINER, EventKind.REMOVE_CONTAINER])
def test_what_is_over_stays_over(world: World, end: EventKind, late: EventKind) -> None:
    """A container that ended by itself is not revived by an event that comes after its end."""
    world.tell(EventKind.START_CONTAINER, container=_app())
    world.tell(end, container=_app())
    state = world.state("c1")
    ticket = world.tell(late, container=_app(state=ContainerState.RUNNING))
    assert (world.state("c1"), ticket) == (state, 0)


def test_older_news_is_ignored(world: World) -> None:
    """An event older than what is known changes nothing, the same one twice neither."""
    world.tell(EventKind.START_CONTAINER, container=_app("2"), at=50)
    world.tell(EventKind.POST_UPDATE_CONTAINER, container=_app("3"), at=40)
    world.tell(EventKind.POST_UPDATE_CONTAINER, container=_app("3"), at=50)
    record = world.registry.container("c1")
    assert record is not None
    assert record.cpus == CpuSet([2])


def test_news_stand_above_the_bundle(world: World) -> None:
    """A cpuset from NRI replaces what a hook read in config.json; its bundle is kept."""
    hook = Container("c1", "p1", cpus=CpuSet([7]), bundle="/run/b/c1", source="hook:createRuntime")
    world.registry.record(hook, stamp_ns=10, pid=5)
    world.tell(EventKind.POST_UPDATE_CONTAINER, container=_app("3"))
    record = world.registry.container("c1")
    assert record is not None
    assert (record.cpus, record.bundle) == (CpuSet([3]), "/run/b/c1")
    world.tell(EventKind.POST_UPDATE_CONTAINER, container=_app(""))
    record = world.registry.container("c1")
    assert record is not None
    assert record.cpus is None  # the spec has none any more


def test_a_container_does_not_change_pods(world: World) -> None:
    """A record of another sandbox, or of a sandbox itself, is not overwritten."""
    world.registry.adopt(Container("c1", "p9", state=ContainerState.RUNNING))
    assert world.tell(EventKind.START_CONTAINER, container=_app()) == 0
    record = world.registry.container("c1")
    assert record is not None
    assert record.sandbox_id == "p9"
    world.tell(EventKind.RUN_POD_SANDBOX)
    assert world.tell(EventKind.START_CONTAINER, container=_app(name="p1")) == 0
    pause = world.registry.container("p1")
    assert pause is not None
    assert pause.kind is ContainerKind.SANDBOX


def test_pods_without_a_vmm_cost_one_look(world: World) -> None:
    """Events of a runc pod leave no record and no mark, and are looked at once."""
    container = replace(_app(), pod_id="r1")
    for kind in (EventKind.RUN_POD_SANDBOX, EventKind.START_CONTAINER, EventKind.STOP_CONTAINER):
        assert world.tell(kind, RUNC, None if kind.of_pod else container) == 0
    assert (world.registry.sandboxes(), world.marks, world.looks) == ([], [], 1)
    world.tell(EventKind.REMOVE_POD_SANDBOX, RUNC)
    world.vmms["r1"] = 300
    assert world.tell(EventKind.RUN_POD_SANDBOX, RUNC) != 0  # forgotten with the pod


def test_a_pod_that_turns_out_to_be_katas_is_taken(world: World) -> None:
    """Judged too early: a hook or Kata's state recorded it since, so its events count."""
    del world.vmms["p1"]
    early = replace(POD, pid=0)
    assert world.tell(EventKind.RUN_POD_SANDBOX, early) == 0
    world.known.add("p1")
    assert world.tell(EventKind.START_CONTAINER, early, _app()) != 0
    assert world.state("c1") is ContainerState.CREATED


@pytest.mark.parametrize("pid", [0, PAUSE])
def test_a_pid_that_is_not_the_vmms_is_no_hint(world: World, pid: int) -> None:
    """A pod is Kata's by its VMM; a pid that says otherwise, or none, is not recorded."""
    assert world.tell(EventKind.RUN_POD_SANDBOX, replace(POD, pid=pid)) != 0
    record = world.registry.container("p1")
    assert record is not None
    assert record.pid_hint == 0


def test_ends_of_unknown_containers(world: World) -> None:
    """The end of a container that was never heard of leaves nothing."""
    assert world.tell(EventKind.STOP_CONTAINER, container=_app()) == 0
    assert world.tell(EventKind.REMOVE_POD_SANDBOX) == 0
    assert world.registry.sandboxes() == []


async def test_rebuild(world: World) -> None:
    """Synchronize replaces all of its pods: new ones, updates, and what is gone."""
    world.tell(EventKind.RUN_POD_SANDBOX, at=1)
    world.tell(EventKind.START_CONTAINER, container=_app(name="gone"), at=2)
    world.tell(EventKind.START_CONTAINER, container=_app("1", name="c1"), at=3)
    world.registry.adopt(Container("x", "p2", state=ContainerState.RUNNING))
    snapshot = Snapshot((POD, RUNC), (_app("5", name="c1"), _app("6", name="c2")))
    await world.intake.rebuild(snapshot, 100)
    assert world.state("gone") is ContainerState.DELETED
    found = {one.id: str(one.cpus) for one in world.registry.containers("p1") if one.state.counts}
    assert found == {"p1": "None", "c1": "5", "c2": "6"}
    assert world.state("x") is ContainerState.RUNNING  # another runtime's
    assert world.marks[-1] == ("p1", "nri:Synchronize")
    assert world.registry.containers("r1") == ()


async def test_rebuild_looks_at_everybody_again(world: World) -> None:
    """A pod that was taken for another runtime's is looked at anew by a Synchronize."""
    assert world.tell(EventKind.RUN_POD_SANDBOX, RUNC) == 0
    world.vmms["r1"] = 300
    await world.intake.rebuild(Snapshot((RUNC,)), 2000)
    assert world.registry.sandboxes() == ["r1"]


async def test_events_during_a_rebuild_are_newer(world: World) -> None:
    """What comes while a Synchronize is taken in is not overwritten by it."""
    world.tell(EventKind.POST_UPDATE_CONTAINER, container=_app("9"), at=200)
    world.tell(EventKind.START_CONTAINER, container=_app("8", name="new"), at=201)
    await world.intake.rebuild(Snapshot((POD,), (_app("5"),)), 100)
    record = world.registry.container("c1")
    assert record is not None
    assert record.cpus == CpuSet([9])
    assert world.state("new") is ContainerState.CREATED
