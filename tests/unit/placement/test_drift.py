"""Drift classes (D2, D13)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY
from kata_pin.base.placement import Desired, DriftKind, Placement, SandboxMask
from kata_pin.placement.drift import find_drift, narrowed
from tests.support.world import cpus, vcpu, vcpus

KEY = vcpu(0).key


def wanting(applied: str, *, step: str = "") -> Placement:
    """Return a placement for vCPU 0."""
    want = cpus(applied)
    return Placement("pod", SandboxMask(want), {KEY: Desired(want, want, "test", step=step)})


@pytest.mark.parametrize(
    ("applied", "observed", "cpuset", "kind"),
    [
        pytest.param("4", "5", "0-15", DriftKind.MOVED, id="other CPUs"),
        pytest.param("4-5", "5-6", "0-15", DriftKind.MOVED, id="overlapping is moved"),
        pytest.param("4", "4-7", "0-15", DriftKind.WIDENED, id="more CPUs"),
        pytest.param("4", "6-7", "6-7", DriftKind.CPUSET_SHRUNK, id="its cpuset lost the CPU"),
        pytest.param("4", "6", "", DriftKind.MOVED, id="an unknown cpuset did not shrink"),
    ],
)
def test_kinds(applied: str, observed: str, cpuset: str, kind: DriftKind) -> None:
    """What the kernel shows against what is desired."""
    (drift,) = find_drift(wanting(applied), [vcpu(0, on=observed, cpuset=cpuset)])
    assert (drift.key, drift.kind) == (KEY, kind)
    assert (drift.desired, drift.observed) == (cpus(applied), cpus(observed))


@pytest.mark.parametrize("cpuset", ["0-15", "", "4"])
def test_a_part_of_its_cpus_is_no_drift(cpuset: str) -> None:
    """A cpuset, known or not, one isolated CPU, Kata, the VMM itself: it runs where it may."""
    assert find_drift(wanting("4-5"), [vcpu(0, on="4", cpuset=cpuset)]) == ()


def test_an_undo_is_not_done_while_cpus_are_missing() -> None:
    """A thread that is to have its former affinity back, and has a part of it, still drifts."""
    desired = replace(wanting("0-15").desired[KEY], release=True)
    placement = Placement("pod", SandboxMask(None), {KEY: desired})
    (drift,) = find_drift(placement, [vcpu(0, on="4")])
    assert drift.kind is DriftKind.NARROWED
    assert narrowed(placement, [vcpu(0, on="4")], {KEY: cpus("0-15")}) == frozenset()


@pytest.mark.parametrize(
    ("applied", "on", "asked", "left"),
    [
        pytest.param("4-5", "4", "4-5", True, id="narrowed after it was set"),
        pytest.param("4-5", "4", "4", False, id="its CPUs have grown"),
        pytest.param("4-5", "4", "", False, id="never set"),
        pytest.param("4-5", "4-6", "4-5", False, id="it may run elsewhere too"),
        pytest.param("4-5", "6", "4-5", False, id="moved"),
    ],
)
def test_what_something_narrows_is_set_once(applied: str, on: str, asked: str, left: bool) -> None:
    """A thread that did not keep all CPUs it was set to is left; it is set when they change."""
    had = {KEY: cpus(asked)} if asked else {}
    assert bool(narrowed(wanting(applied), [vcpu(0, on=on)], had)) is left


def test_fallback_is_cpuset_shrunk() -> None:
    """A thread that needed a fallback and is not there yet lost CPUs of its cgroup."""
    (drift,) = find_drift(wanting("6", step="cpuset"), [vcpu(0, on="6-7", cpuset="6-7")])
    assert drift.kind is DriftKind.CPUSET_SHRUNK


def test_no_drift() -> None:
    """A thread on its desired affinity is no drift, and one that is left alone neither."""
    assert find_drift(wanting("4"), [vcpu(0, on="4"), vcpu(1, on="0-9")]) == ()


def test_gone() -> None:
    """A desired thread that is not observed is gone."""
    (drift,) = find_drift(wanting("4"), [])
    assert (drift.kind, drift.observed) == (DriftKind.THREAD_GONE, EMPTY)


def test_new_needs_the_pass_before() -> None:
    """A thread that was not there before is new, not moved."""
    threads = [vcpu(0, on="5")]
    assert find_drift(wanting("4"), threads, known=())[0].kind is DriftKind.THREAD_NEW
    assert find_drift(wanting("4"), threads, known={KEY})[0].kind is DriftKind.MOVED


def test_other_cpus_than_before_are_no_drift() -> None:
    """A thread that is where it was placed, and belongs elsewhere now, was moved by nobody."""
    threads = [vcpu(0, on="5")]
    for before, kind in (
        (wanting("5").desired, DriftKind.PLACEMENT_CHANGED),
        ({}, DriftKind.PLACEMENT_CHANGED),
        (wanting("4").desired, DriftKind.MOVED),
        (None, DriftKind.MOVED),
    ):
        (drift,) = find_drift(wanting("4"), threads, known={KEY}, before=before)
        assert drift.kind is kind
    assert {kind for kind in DriftKind if kind.expected} == {
        DriftKind.THREAD_NEW,
        DriftKind.THREAD_GONE,
        DriftKind.PLACEMENT_CHANGED,
    }


def test_another_writers_thread() -> None:
    """A thread that is left to another writer is told apart from other drift, while it is off."""
    threads = [vcpu(0, on="5")]
    (drift,) = find_drift(wanting("4"), threads, backed_off={KEY})
    assert drift.kind is DriftKind.OTHER_WRITER
    assert find_drift(wanting("5"), threads, backed_off={KEY}) == ()


def test_in_order_of_keys() -> None:
    """Drifts come in the order of thread keys, whatever order the threads had."""
    threads = vcpus(0, 1, 2, on="9")
    desired = {one.key: Desired(cpus("4"), cpus("4"), "test") for one in reversed(threads)}
    found = find_drift(Placement("pod", SandboxMask(cpus("4")), desired), threads[::-1])
    assert [one.key for one in found] == [one.key for one in threads]
