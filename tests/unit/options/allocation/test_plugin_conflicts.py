"""When another NRI plugin is believed to be there, and when a tenant's failures are just that."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import AtCreation, ContainerRequest, Limits, Mount
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.options.allocation.holders import (
    BEFORE,
    BEHIND,
    EXPIRY_S,
    NAMESPACES,
    PODS,
    REMEMBERED,
    PluginConflicts,
    set_fields,
)
from kata_pin.peers.nri.replies import Cpuset
from tests.support.allotted import request


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reported() -> list[NodeEventKind]:
    return []


@pytest.fixture
def conflicts(clock: Clock, reported: list[NodeEventKind]) -> PluginConflicts:
    return PluginConflicts(lambda kind, *_: reported.append(kind), clock)


def _one(name: str, namespace: str = "shop", attempt: int = 0) -> ContainerRequest:
    one = request(name, cpus=1)
    pod = replace(one.pod, namespace=namespace)
    return replace(one, pod=pod, container_id=f"c-{name}-{attempt}")


def _fail(conflicts: PluginConflicts, one: ContainerRequest, *, adjusted: bool = True) -> None:
    conflicts.answered(one, "cpuset" if adjusted else "")
    conflicts.ended(one.container_id)


def _conflict(conflicts: PluginConflicts, name: str, namespace: str = "shop") -> None:
    """Have a pod made only without our cpuset, and with that of another plugin."""
    _fail(conflicts, _one(name, namespace))
    again = _one(name, namespace, 1)
    assert conflicts.leaves_alone(again)
    conflicts.answered(again, "")
    conflicts.created(again.container_id, with_cpuset=True)


def test_cpusets_that_pods_come_with(conflicts: PluginConflicts) -> None:
    """Some pods in a row that come with a cpuset show a plugin before us; one without ends it."""
    for number in range(PODS):
        assert conflicts.present == ()
        conflicts.arrived(_one(f"p{number}"), with_cpuset=True)
    assert [*conflicts.present] == [BEFORE]
    conflicts.arrived(_one("plain"), with_cpuset=False)
    assert conflicts.present == ()


def test_one_pod_shows_no_plugin(conflicts: PluginConflicts) -> None:
    """However often it is made with a cpuset that it found a way to set."""
    for attempt in range(5 * PODS):
        conflicts.arrived(_one("p", attempt=attempt), with_cpuset=True)
    assert (conflicts.present, conflicts.given) == ((), 1)


def test_creations_that_fail_with_and_without_us(conflicts: PluginConflicts) -> None:
    """A container that cannot be made at all, of any number of pods, is no sign of anything."""
    for number in range(10 * PODS):
        name, namespace = f"p{number}", f"n{number}"
        _fail(conflicts, _one(name, namespace))
        again = _one(name, namespace, 1)
        assert conflicts.leaves_alone(again)
        _fail(conflicts, again, adjusted=False)
        assert not conflicts.leaves_alone(_one(name, namespace, 2))
    assert (conflicts.present, conflicts.conflicts) == ((), 0)


def test_a_creation_that_succeeds_later_by_itself(conflicts: PluginConflicts) -> None:
    """Created without any cpuset: no other plugin has set one, so it is adjusted."""
    for number in range(PODS):
        _fail(conflicts, _one(f"p{number}", f"n{number}"))
        again = _one(f"p{number}", f"n{number}", 1)
        conflicts.answered(again, "")
        conflicts.created(again.container_id, with_cpuset=False)
        assert not conflicts.leaves_alone(_one(f"p{number}", f"n{number}", 2))
    assert conflicts.present == ()


def test_other_fields_than_the_cpuset(conflicts: PluginConflicts) -> None:
    """Created only without them: they are named, the container is left alone for a while, and
    nothing is suspended, because it may have been anything else."""
    for number in range(2 * PODS):
        name, namespace = f"p{number}", f"n{number}"
        first, again = _one(name, namespace), _one(name, namespace, 1)
        conflicts.answered(first, "cpuset, CPU shares")
        conflicts.ended(first.container_id)
        conflicts.answered(again, "")
        conflicts.created(again.container_id, with_cpuset=False)
        assert conflicts.leaves_alone(_one(name, namespace, 2))
    assert (conflicts.present, conflicts.conflicts) == ((), 0)


def test_what_an_answer_sets_in_words() -> None:
    """Every field has a name."""
    limits = Limits(2, 1000, 1000, 1 << 30)
    creation = AtCreation((("2MB", 0),), "a", "b", (("A", ""),), (Mount("/a", "/b"),))
    assert set_fields(Cpuset(), AtCreation()) == ""
    assert set_fields(Cpuset(mems=CpuSet([0])), AtCreation()) == "cpuset"
    assert set_fields(Cpuset(limits=limits), creation) == (
        "CPU shares, CPU quota, CPU period, memory limit, hugepage limits, RDT class, "
        "block-I/O class, environment, mounts"
    )


def test_conflicts_of_several_pods(conflicts: PluginConflicts) -> None:
    """Pods of several namespaces that are created only without us: then none is adjusted."""
    for number in range(PODS):
        assert conflicts.present == ()
        _conflict(conflicts, f"p{number}", f"n{number % NAMESPACES}")
    assert [*conflicts.present] == [BEHIND]
    assert conflicts.leaves_alone(_one("another"))


def test_conflicts_of_one_namespace(conflicts: PluginConflicts) -> None:
    """One tenant's pods do not switch anything off; each is left alone for itself."""
    for number in range(5 * PODS):
        _conflict(conflicts, f"p{number}")
    assert conflicts.present == ()
    assert conflicts.leaves_alone(_one("p0", attempt=2))
    assert not conflicts.leaves_alone(_one("another"))


def test_conflicts_of_one_pod(conflicts: PluginConflicts) -> None:
    """Its containers count once, whatever its namespace."""
    for number in range(PODS):
        one = _one("p", f"n{number}")
        first = replace(one, name=f"app{number}", container_id=f"c{number}")
        _fail(conflicts, first)
        again = replace(first, container_id=f"d{number}")
        conflicts.answered(again, "")
        conflicts.created(again.container_id, with_cpuset=True)
    assert (conflicts.present, conflicts.conflicts) == ((), 1)


def test_a_creation_that_succeeds_with_us(conflicts: PluginConflicts) -> None:
    """A container that was adjusted and created shows that no later plugin sets the same."""
    for number in range(PODS):
        _conflict(conflicts, f"p{number}", f"n{number}")
    good = _one("good")
    conflicts.answered(good, "cpuset")
    conflicts.created(good.container_id, with_cpuset=True)
    assert (conflicts.present, conflicts.conflicts) == ((), 0)


def test_everything_is_forgotten_after_a_while(conflicts: PluginConflicts, clock: Clock) -> None:
    """A suspension ends by itself, and containers that failed are adjusted again."""
    for number in range(PODS):
        conflicts.arrived(_one(f"g{number}"), with_cpuset=True)
        _conflict(conflicts, f"p{number}", f"n{number}")
    clock.now += EXPIRY_S - 1
    assert [*conflicts.present] == [BEFORE, BEHIND]
    clock.now += 1
    assert conflicts.present == ()
    assert not conflicts.leaves_alone(_one("p0", "n0", 2))


def test_signs_long_apart_do_not_add_up(conflicts: PluginConflicts, clock: Clock) -> None:
    """Only those of the last while are counted."""
    for number in range(5 * PODS):
        _conflict(conflicts, f"p{number}", f"n{number}")
        clock.now += EXPIRY_S / (PODS - 1)
        assert conflicts.present == ()


def test_a_new_connection(conflicts: PluginConflicts) -> None:
    """Unfinished creations and conflicts are forgotten; failed containers are still left alone."""
    for number in range(PODS):
        _conflict(conflicts, f"p{number}", f"n{number}")
    under_way = _one("q")
    conflicts.answered(under_way, "cpuset")
    conflicts.reconnected()
    conflicts.ended(under_way.container_id)
    assert conflicts.present == ()
    assert conflicts.leaves_alone(_one("p0", "n0", 2))
    assert not conflicts.leaves_alone(under_way)


def test_what_is_remembered_is_bounded(conflicts: PluginConflicts) -> None:
    """Any number of failing pods takes the same room; the oldest are forgotten."""
    for number in range(2 * REMEMBERED):
        _fail(conflicts, _one(f"p{number}"))
        conflicts.arrived(_one(f"p{number}"), with_cpuset=True)
    assert conflicts.given == REMEMBERED
    assert not conflicts.leaves_alone(_one("p0"))
    assert conflicts.leaves_alone(_one(f"p{2 * REMEMBERED - 1}"))


def test_signs_are_reported(conflicts: PluginConflicts, reported: list[NodeEventKind]) -> None:
    """A creation that fails with ours, and one that succeeds without, are events of the node."""
    _conflict(conflicts, "p0")
    assert reported == [NodeEventKind.PLUGIN_CONFLICT] * 2
