"""Kata rewrites the sandbox's cpuset: 6.1 wipes every pin, 6.12 keeps them, stale ones included."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from tests.e2e.katapods import LabPod, Pods
from tests.e2e.node import Node
from tests.support.daemon import Node as PrivateNode
from tests.support.waiting import wait_for

PAIRS: Final = {0: 4, 1: 5}
REST: Final = {6, 7}

pytestmark = pytest.mark.usefixtures("kvm", "untouched")


@pytest.fixture
def pod(start_pod: Pods) -> LabPod:
    """A pod with exclusive CPUs 4 and 5 and shared CPUs 6 and 7, all set."""
    pod = start_pod(cpus="4-7")
    pod.create("c1", "4,5", exclusive=True)
    pod.create("c2", "6,7")
    pod.wait_placed(REST, PAIRS)
    return pod


def _vcpus(pod: LabPod) -> dict[int, set[int]]:
    return {index: os.sched_getaffinity(tid) for index, tid in pod.kata.vcpus().items()}


def test_wiped_pins_are_back_at_once(node: Node, pinner: PrivateNode, pod: LabPod) -> None:
    """Linux 6.1 widens every pinned thread to the new cpuset; that it was written puts them back.

    Audits are an hour apart here, and no hook runs. Linux 6.12 keeps the pins.
    """
    assert pinner.daemon is not None
    with pinner.daemon.hung():  # else it is too quick for us
        pod.confine("4-8")
        wide = {4, 5, 6, 7, 8}
        assert _vcpus(pod) == ({0: {4}, 1: {5}} if node.pins_stick else {0: wide, 1: wide})
    pod.wait_placed(REST, PAIRS)


@pytest.fixture
def blind(pinner: PrivateNode, pod: LabPod) -> Iterator[PrivateNode]:
    """The daemon hears of no written file, and looks at affinities each second."""
    before = dict(pinner.settings)
    often = {"affinity_s": 1, "deep_s": 3600}
    _restart(pinner, {**before, "changes": "audit", "audit": often})
    assert pod.misplaced(REST, PAIRS) == []
    yield pinner
    _restart(pinner, before)


def _restart(pinner: PrivateNode, settings: dict[str, Any]) -> None:
    assert pinner.daemon is not None
    pinner.configure(**settings)
    pinner.daemon.terminate()
    pinner.start()
    pinner.ask("reconcile")  # what follows is not the start's doing


def test_wiped_pins_are_back_within_one_audit(node: Node, blind: PrivateNode, pod: LabPod) -> None:
    """With no event one affinity audit finds and repairs what 6.1 wiped; 6.12 has nothing."""
    for cpus in ("4-8", "4-7", "4-8"):  # more often than another writer is given (D13)
        before = _audits(blind, pod)
        pod.confine(cpus)
        pod.wait_placed(REST, PAIRS)
        assert _audits(blind, pod) - before == (0 if node.pins_stick else 1)
    assert blind.wait_state("p1", "ok")


def test_rewrite_of_the_same_cpuset(node: Node, pod: LabPod) -> None:
    """A write that changes nothing wipes no pin on either kernel's cgroup version 2."""
    pod.confine("4-7")
    if node.cgroup == 2:
        assert pod.misplaced(REST, PAIRS) == []
    pod.started("c1")
    pod.wait_placed(REST, PAIRS)


def test_disjoint_cpuset_is_shown_with_the_step(
    pinner: PrivateNode, pod: LabPod, configure: Callable[..., None]
) -> None:
    """Kata's cgroup moves before its state tells: step and cgroup are shown, later all is right."""
    configure(audit={"affinity_s": 1, "deep_s": 2})
    pod.confine("8-11")
    tids = list(pod.kata.vcpus().values())
    wait_for(lambda: {pod.shown()[tid]["fallback"] for tid in tids} == {"cpuset"}, "the step")
    one = pod.shown()[tids[0]]
    assert (one["desired"], one["expected"], one["affinity"]) == ("4", "8-11", "8-11")
    assert f"/kata_{pod.id} allows only 8-11" in one["reason"]
    pod.confine("4-7")
    pod.wait_placed(REST, PAIRS)
    assert pinner.wait_state("p1", "ok")


def test_stale_pin_that_resurfaces_is_put_right(
    node: Node, pinner: PrivateNode, pod: LabPod, configure: Callable[..., None]
) -> None:
    """Pins from before a disjoint cpuset come back by themselves on 6.12, and are wrong by now.

    The daemon is stopped meanwhile, so nobody replaces them in time.
    """
    configure(audit={"affinity_s": 1, "deep_s": 2})
    assert pinner.daemon is not None
    with pinner.daemon.hung():
        pod.update({"c1": "8,9", "c2": "10,11"}, "8-11")
        assert _vcpus(pod) == {0: {8, 9, 10, 11}, 1: {8, 9, 10, 11}}
        pod.update({"c1": "6,7", "c2": "4,5"}, "4-7")
        wide = {4, 5, 6, 7}
        assert _vcpus(pod) == ({0: {4}, 1: {5}} if node.pins_stick else {0: wide, 1: wide})
    pod.wait_placed({4, 5}, {0: 6, 1: 7})
    assert pinner.wait_state("p1", "ok")


def _audits(pinner: PrivateNode, pod: LabPod) -> int:
    """Return how often an audit has found something of this sandbox."""
    return sum(
        f"sandbox {pod.id}: audit:" in line and "moved" in line for line in pinner.log.splitlines()
    )
