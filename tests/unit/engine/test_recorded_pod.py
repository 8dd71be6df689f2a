"""Passes over the recorded pod of runtime-rs, beside Kata's writes of cpusets and its own pins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kata_pin.base.sandbox import Container
from kata_pin.base.values import ThreadRole
from tests.support.recordedpod import DATA, QEMU, SANDBOX, VCPUS, VIRTIOFSD, RecordedPod, app, log
from tests.support.world import cpus


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[RecordedPod]:
    """The pod under Kata's default: it does not pin."""
    with closing(RecordedPod(tmp_path)) as one:
        yield one


@pytest.fixture
def pinned_by_kata(tmp_path: Path) -> Iterator[RecordedPod]:
    """The pod of a handler with enable_vcpus_pinning."""
    with closing(RecordedPod(tmp_path, own_pinning=True)) as one:
        yield one


def test_the_recorded_threads_have_the_recorded_places(pod: RecordedPod) -> None:
    """What kata-pin made of this pod on the real machine (threads.tsv) is made of it here."""
    pod.kernel.write_cpuset("0-3,6-15")
    report = pod.run(app("6-7"), log("0-3,8-15"))
    assert pod.masks(VCPUS) == ["0-3,8-15", "6", "7"]
    assert pod.masks([QEMU, *VIRTIOFSD]) == ["0-3,8-15"] * 6
    roles = {thread.key.tid: thread.role.role for thread in report.threads}
    assert [roles[tid] for tid in VIRTIOFSD] == [ThreadRole.VIRTIOFSD] * 5
    assert len(roles) == 20


def test_whether_a_pass_saw_all(pod: RecordedPod) -> None:
    """A thread or a helper that is born once a pass has looked is noticed; so is the VMM's end."""
    engine, task = pod.engine, Path(pod.root.proc(QEMU, "task"))
    there = {int(name) for name in os.listdir(pod.root.proc()) if name.isdecimal()}
    show = pod.hide(there.intersection(VIRTIOFSD))
    pod.run(app("6-7"), log("0-3,8-15"))
    assert engine.saw_all(SANDBOX, pod.cache)
    show()
    assert not engine.saw_all(SANDBOX, pod.cache)
    pod.run(app("6-7"), log("0-3,8-15"))
    assert engine.saw_all(SANDBOX, pod.cache)
    (task / str(VCPUS[0])).rename(task / "99999")
    assert not engine.saw_all(SANDBOX, pod.cache)
    (task / "99999").rename(task / str(VCPUS[0]))
    assert engine.saw_all(SANDBOX, pod.cache)
    pod.hide([QEMU])
    assert not engine.saw_all(SANDBOX, pod.cache)


def test_an_update_goes_as_recorded(pod: RecordedPod) -> None:
    """Kata's cpuset takes the vCPUs off their pins, the next pass pins all: each mask on the way.

    The threads of QEMU and virtiofsd in masks-over-update.txt; its shim and kvm-pit are left out.
    """
    lines = (DATA / "masks-over-update.txt").read_text().splitlines()
    recorded: dict[int, list[str]] = {}
    for line in lines:
        _time, process, tid, rest = line.split(maxsplit=3)
        if process != "kthread":
            recorded.setdefault(int(tid), []).append(rest.rpartition("-> ")[2])
    played: dict[int, list[str]] = {tid: [] for tid in recorded}

    def look() -> None:
        for tid, masks in played.items():
            (mask,) = pod.masks([tid])
            if masks[-1:] != [mask]:
                masks.append(mask)

    pod.kernel.write_cpuset("0-3,6-15")
    pod.run(app("6-7"), log("0-3,8-15"))
    look()
    pod.kernel.write_cpuset("0-3,8-15")
    look()
    pod.run(app("12-13"), log("0-3,8-15"))
    look()
    assert played == recorded


def test_kata_pins_before_the_containers_are_reported(pinned_by_kata: RecordedPod) -> None:
    """The cgroup's new union has as many CPUs as there are vCPUs, the records have one more."""
    pod = pinned_by_kata
    pod.kernel.write_cpuset("12-15")
    pod.run(app("12-13"), log("14-15"))
    assert pod.masks(VCPUS) == ["14-15", "12", "13"]
    pod.kernel.write_cpuset("12-14")
    pod.kernel.kata_pins()
    report = pod.run(app("12-13"), log("14-15"))  # the pass of the written cpuset
    assert pod.masks(VCPUS) == ["12", "13", "14"]
    assert report.placement is not None
    assert "kata-pins-vcpus" in {note.code for note in report.placement.notes}
    pod.run(app("12-13"), log("14"))  # and that of NRI's report
    assert pod.masks(VCPUS) == ["12", "13", "14"]


@pytest.mark.parametrize("restarts", [False, True])
def test_pins_that_a_late_pass_overwrote_are_put_back(
    pinned_by_kata: RecordedPod, *, restarts: bool
) -> None:
    """Kata writes the cpuset and pins while a pass is about to set pairs; it does not pin again."""
    pod = pinned_by_kata
    pod.kernel.write_cpuset("12-15")

    def kata_is_faster(tid: int) -> None:
        if tid == VCPUS[0]:
            pod.kernel.before_set = lambda _: None
            pod.kernel.write_cpuset("12-14")
            pod.kernel.kata_pins()

    pod.kernel.before_set = kata_is_faster
    pod.run(app("12-13"), log("14-15"))
    for _ in range(2):
        if restarts:
            pod.restart()
        pod.run(app("12-13"), log("14-15"))
    assert pod.masks(VCPUS) == ["12", "13", "14"]
    assert pod.pins.pairs(SANDBOX) == {}


def test_katas_own_pins_are_never_moved_by_hand_over(pinned_by_kata: RecordedPod) -> None:
    """Once Kata has its vCPUs, nothing is set: not even where something else has moved them."""
    pod = pinned_by_kata
    pod.kernel.write_cpuset("12-14")
    pod.kernel.kata_pins()
    pod.run(app("12-13"), log("14"))
    pod.kernel.set_affinity(VCPUS[1], {12})
    pod.run(app("12-13"), log("14"))
    assert pod.masks(VCPUS) == ["12", "12", "14"]


@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize("restarts", [False, True])
def test_an_undo_leaves_katas_own_pins(
    pinned_by_kata: RecordedPod, *, reported: bool, restarts: bool
) -> None:
    """`unpin` and `uninstall` restore what kata-pin set; the vCPUs stay as Kata pinned them."""
    pod = pinned_by_kata
    pod.kernel.write_cpuset("12-15")
    pod.run(app("12-13"), log("14-15"))
    pod.kernel.write_cpuset("12-14")
    pod.kernel.kata_pins()
    containers = (app("12-13"), log("14" if reported else "14-15"))
    pod.run(*containers)
    if restarts:
        pod.restart()
    pod.run(*containers, release=True)
    assert pod.masks(VCPUS) == ["12", "13", "14"]
    assert pod.masks([QEMU, *VIRTIOFSD]) == ["12-14"] * 6
    assert pod.pins.first_seen(SANDBOX) == {}


def test_an_undo_puts_overwritten_pins_of_kata_back(pinned_by_kata: RecordedPod) -> None:
    """The vCPUs have pairs of kata-pin, set too late; what they had before is Kata's."""
    pod = pinned_by_kata
    pod.kernel.write_cpuset("12-15")
    pod.run(app("12-13"), log("14-15"))
    pairs = [pod.kernel.affinities[tid] for tid in VCPUS]
    pod.kernel.write_cpuset("12-14")
    pod.kernel.kata_pins()
    for tid, pair in zip(VCPUS, pairs, strict=True):
        pod.kernel.set_affinity(tid, pair)
    pod.run(app("12-13"), log("14-15"), release=True)
    assert pod.masks(VCPUS) == ["12", "13", "14"]


def test_vcpus_are_paired_again_when_katas_rule_ends(pinned_by_kata: RecordedPod) -> None:
    """Kata takes its pins back where counts differ, and an undo then restores the vCPUs too."""
    pod = pinned_by_kata
    pod.kernel.write_cpuset("12-14")
    pod.kernel.kata_pins()
    pod.run(app("12-13"), log("14"))
    pod.kernel.write_cpuset("12-15")
    for tid in VCPUS:
        pod.kernel.set_affinity(tid, {12, 13, 14, 15})
    pod.run(app("12-13"), log("14-15"))
    assert pod.masks(VCPUS) == ["14-15", "12", "13"]
    pod.run(app("12-13"), log("14-15"), release=True)
    pod.kernel.write_cpuset("0-15")
    assert pod.masks(VCPUS) == ["0-15"] * 3


EVERY_THREAD = (QEMU, *VCPUS, *VIRTIOFSD)


def _released(pod: RecordedPod, *containers: Container) -> set[str]:
    """Return the affinities after an undo, once the cgroup allows all CPUs."""
    pod.run(*containers, release=True)
    pod.kernel.write_cpuset("0-15")
    return set(pod.masks(EVERY_THREAD))


def test_a_cpuset_written_during_the_first_pass_is_no_first_mask(pod: RecordedPod) -> None:
    """QEMU's threads were read before Kata wrote it, virtiofsd's afterwards."""

    def kata_writes(tid: int) -> None:
        if tid == VIRTIOFSD[0]:
            pod.kernel.before_read = lambda _: None
            pod.kernel.write_cpuset("6-7")

    pod.kernel.before_read = kata_writes
    pod.run(app("6-7"))
    assert pod.kernel.before_read is not kata_writes
    assert _released(pod, app("6-7")) == {"0-15"}


@pytest.mark.parametrize("passes_before", [0, 1])
def test_a_cpuset_that_threads_do_not_follow_yet_is_no_first_mask(
    pod: RecordedPod, passes_before: int
) -> None:
    """The cgroup shows the wider cpuset, and threads still have the narrower one."""
    pod.kernel.write_cpuset("5-7")
    for _ in range(passes_before):
        pod.run(log(None))
    containers = (app("6-7"), log("0-3,8-15" if passes_before else "5"))
    pod.kernel.begin_cpuset("0-3,6-15" if passes_before else "0-15")
    pod.run(*containers)
    assert _released(pod, *containers) == {"0-15"}


def test_pins_of_a_daemon_that_lost_its_registry_are_no_first_masks(pod: RecordedPod) -> None:
    """Its threads are on pairs and on the shared CPUs, as the next daemon wants them."""
    containers = (app("6-7"), log("0-3,8-15"))
    pod.run(*containers)
    pod.restart(registry_lost=True)
    pod.run(*containers)
    assert _released(pod, *containers) == {"0-15"}


def test_katas_pins_are_no_first_masks(pinned_by_kata: RecordedPod) -> None:
    """Kata's rule ended before kata-pin came: what Kata left on the vCPUs is not to be restored."""
    pod = pinned_by_kata
    pod.kernel.write_cpuset("12-14")
    pod.kernel.kata_pins()
    pod.kernel.write_cpuset("12-15")
    containers = (app("12-13"), log("14-15"))
    pod.run(*containers)
    assert _released(pod, *containers) == {"0-15"}


def test_an_inherited_pin_is_no_first_mask(pod: RecordedPod) -> None:
    """A role that appears later has the pins of the thread that made it."""
    containers = (app("6-7"), log("0-3,8-15"))
    late = VIRTIOFSD[:1]
    hidden = pod.hide(late)
    pod.run(*containers)
    hidden()
    pod.kernel.set_affinity(*late, {0, 1})
    pod.run(*containers)
    assert pod.masks(late) == ["0-3,8-15"]
    assert _released(pod, *containers) == {"0-15"}


def test_what_an_operator_had_set_is_restored_and_reported(pod: RecordedPod) -> None:
    """`taskset` before the first pass, with a cpuset at rest: that is a reason."""
    for tid in pod.kernel.members:
        pod.kernel.set_affinity(tid, range(8))
    containers = (app("6-7"), log("0-3,8-15"))
    pod.run(*containers)
    report = pod.run(*containers, release=True)
    assert set(pod.masks(EVERY_THREAD)) == {"0-7"}
    notes = {note.code: note.text for note in report.notes}
    assert notes["kept-narrow"] == (
        "15 threads keep 0-7, fewer CPUs than their cgroup allows: their affinity before kata-pin"
        " set it"
    )


def test_what_an_undo_leaves_is_reported(pinned_by_kata: RecordedPod) -> None:
    """Kata's own pins, and threads of which nothing is recorded: a second undo says it too."""
    pod = pinned_by_kata
    pod.kernel.write_cpuset("12-14")
    pod.kernel.kata_pins()
    containers = (app("12-13"), log("14"))
    pod.run(*containers)
    pod.run(*containers, release=True)
    for tid in VIRTIOFSD:
        pod.kernel.set_affinity(tid, {12})
    report = pod.run(*containers, release=True)
    assert [note.text for note in report.notes] == [
        "3 vCPUs stay as Kata pinned them: 12-14",
        "5 threads keep 12, fewer CPUs than their cgroup allows: kata-pin did not set it",
    ]
    assert report.results == ()


@pytest.mark.parametrize("moment", [*EVERY_THREAD])
def test_kata_writes_a_cpuset_during_an_undo(pod: RecordedPod, moment: int) -> None:
    """Whenever it does: no thread stays on a part of what it had."""
    containers = (app("6-7"), log("0-3,8-15"))
    pod.kernel.write_cpuset("0-3,6-15")
    pod.run(*containers)

    def kata_writes(tid: int) -> None:
        if tid == moment:
            pod.kernel.before_set = lambda _: None
            pod.kernel.write_cpuset("8-15")

    pod.kernel.before_set = kata_writes
    assert _released(pod, *containers) == {"0-15"}
    assert pod.pins.first_seen(SANDBOX) == {}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_vm_that_boots_keeps_off_others_cpus(pod: RecordedPod, *, restarts: bool) -> None:
    """Until it has a container; then what it had while it booted is nothing to go back to."""
    pod.beside = cpus("4-5,8-9")
    report = pod.run()
    assert set(pod.masks(EVERY_THREAD)) == {"0-3,6-7,10-15"}
    assert report.placement is not None
    assert report.placement.mask.exclusive == cpus("")
    if restarts:
        pod.restart()
    pod.kernel.write_cpuset("6-7")
    pod.run(app("6-7"))
    assert pod.masks(VCPUS) == ["6-7", "6", "7"]
    assert _released(pod, app("6-7")) == {"0-15"}


def test_a_vm_that_boots_has_all_cpus_again_once_others_have_none(pod: RecordedPod) -> None:
    """What it was kept off is given back, without a word of an operator."""
    pod.beside = cpus("4-5")
    pod.run()
    pod.beside = cpus("")
    pod.run()
    assert set(pod.masks(EVERY_THREAD)) == {"0-15"}
    assert pod.pins.first_seen(SANDBOX) == {}
