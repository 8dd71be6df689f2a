"""CPUs that an administrator names: applied and undone as one, above the policy, below the rest."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kata_pin.base.placement import Binding, Report
from kata_pin.base.steps import finish
from kata_pin.placement.notes import UNBOUND
from tests.support.recordedpod import (
    QEMU,
    SANDBOX,
    VCPUS,
    VIRTIOFSD,
    RecordedPod,
    app,
    log,
)
from tests.support.world import cpus

POD = (app("6-7"), log("0-3,8-15"))
OTHERS = (QEMU, *VIRTIOFSD)
BINDING = Binding(cpus("0-2"), cpus("4-5,9"), cpus("8"))
FREE = ["0-3,8-15", "6", "7", *["0-3,8-15"] * 6]
"""Masks of vCPUs and others by policy."""
BOUND = ["4", "5", "9", *["8"] * 6]


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[RecordedPod]:
    """The pod with pins by policy, in a cgroup that allows every CPU."""
    with closing(RecordedPod(tmp_path)) as one:
        one.run(*POD)
        assert masks(one) == FREE
        yield one


def masks(pod: RecordedPod) -> list[str]:
    """Return the masks of all vCPUs and some of the others."""
    return pod.masks([*VCPUS, *OTHERS])


def why(report: Report) -> str:
    """Return why a pass ended a binding."""
    return "; ".join(note.text for note in report.notes if note.code == UNBOUND)


def test_a_binding_is_applied_and_read_back(pod: RecordedPod) -> None:
    """vCPUs in order, everything else on the overhead; a note says so; the end undoes it."""
    pod.pins.bind(SANDBOX, BINDING)
    report = pod.run(*POD)
    assert masks(pod) == BOUND
    assert report.all_placed
    assert report.placement is not None
    assert report.placement.binding == BINDING
    (note,) = [one.text for one in report.placement.notes if one.code == "bound"]
    assert note.startswith("bound by hand: vCPUs 0-2 on pCPUs 4-5,9, overhead on 8;")
    pod.pins.bind(SANDBOX, None)
    pod.run(*POD)
    assert masks(pod) == FREE


def test_the_pairs_before_come_back(pod: RecordedPod) -> None:
    """Also where the binding was a legal pairing: vCPUs 1 and 2 on each other's CPUs."""
    pod.pins.bind(SANDBOX, Binding(cpus("0-1"), cpus("6-7")))
    report = pod.run(*POD)
    assert pod.masks(VCPUS) == ["6", "7", "0-3,8-15"]
    assert report.placement is not None
    owned = {key.tid: one.container_id for key, one in report.placement.desired.items()}
    assert [owned[tid] for tid in VCPUS] == ["app", "app", ""], "the guest's cpusets follow"
    pod.pins.bind(SANDBOX, None)
    pod.run(*POD)
    assert masks(pod) == FREE


def test_more_vcpus_than_cpus_share_them(pod: RecordedPod) -> None:
    """Only as many CPUs as vCPUs are dealt one to one; the rest is by policy."""
    pod.pins.bind(SANDBOX, Binding(cpus("0-1"), cpus("8-10")))
    pod.run(*POD)
    assert pod.masks(VCPUS) == ["8-10", "8-10", "6-7"]
    assert pod.masks([QEMU]) == ["0-3,11-15"], "off the bound CPUs"


def test_it_outlives_a_restart_and_ends_in_time(pod: RecordedPod) -> None:
    """A daemon that starts again goes by it until its time."""
    later = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 3_600 * 10**9
    pod.pins.bind(SANDBOX, Binding(cpus("0-2"), cpus("4-5,9"), cpus("8"), later, "06:00"))
    pod.run(*POD)
    pod.restart()
    pod.run(*POD)
    assert masks(pod) == BOUND
    pod.pins.bind(SANDBOX, Binding(cpus("0-2"), cpus("4-5,9"), cpus("8"), 1, "06:00"))
    report = pod.run(*POD)
    assert masks(pod) == FREE
    assert not why(report), "that its time ended is no failure"


def test_unpin_ends_it(pod: RecordedPod) -> None:
    """What an operator gave back stays so, and `pin` starts by policy."""
    pod.pins.bind(SANDBOX, BINDING)
    pod.run(*POD)
    pod.pins.set_released([SANDBOX], released=True)
    pod.run(*POD, release=True)
    assert pod.pins.binding(SANDBOX) is None
    pod.pins.set_released([SANDBOX], released=False)
    pod.run(*POD)
    assert masks(pod) == FREE


@pytest.mark.parametrize(
    ("binding", "text"),
    [
        (Binding(cpus("0-3"), cpus("4-5,8-9")), "the VM has no vCPU 3"),
        (Binding(cpus("0"), cpus("16")), "pCPU 16 is not online"),
        (Binding(cpus("0"), cpus("4"), cpus("5,20")), "pCPU 20 is not online"),
        (Binding(cpus("0"), cpus("12")), "pCPU 12 is exclusive to another pod"),
        (Binding(cpus("0"), cpus("4"), cpus("12-13")), "pCPUs 12-13 are exclusive to another pod"),
    ],
)
def test_what_cannot_be_had_whole_is_not_applied(
    pod: RecordedPod, binding: Binding, text: str
) -> None:
    """Refused when it is tried, and ended by a pass: everything is by policy."""
    pod.beside = cpus("12-13")
    trial = finish(pod.engine.foresee(SANDBOX, POD, pod.cache, binding))
    assert trial.placement is not None
    assert text in trial.placement.unbound
    assert masks(pod) == FREE
    pod.pins.bind(SANDBOX, binding)
    report = pod.run(*POD)
    assert text in why(report)
    assert pod.pins.binding(SANDBOX) is None
    assert masks(pod) == FREE
    assert not why(pod.run(*POD)), "it is said once"


def test_a_cgroup_that_does_not_allow_a_cpu_ends_it(pod: RecordedPod) -> None:
    """When it is tried, and when Kata narrows the cgroup later."""
    pod.pins.bind(SANDBOX, BINDING)
    pod.run(*POD)
    pod.kernel.write_cpuset("0-3,6-15")
    report = pod.run(*POD)
    assert f"of vcpu 0 (tid {VCPUS[0]}) allows only 0-3,6-15" in why(report)
    assert masks(pod) == FREE


def test_one_affinity_that_is_refused_undoes_the_others(pod: RecordedPod) -> None:
    """In the same pass."""

    def refuse(tid: int) -> None:
        if tid == VCPUS[2] and pod.pins.binding(SANDBOX) is not None:
            raise OSError(errno.EPERM, "no")

    pod.pins.bind(SANDBOX, BINDING)
    pod.kernel.before_set = refuse
    report = pod.run(*POD)
    assert "the affinity of vCPU 2 was not set (denied)" in why(report)
    assert masks(pod) == FREE
