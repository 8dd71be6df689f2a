"""Creation order: what it says when the numbers fit, and that it says nothing when they do not."""

from __future__ import annotations

import pytest

from kata_pin.base.cpuset import EMPTY
from kata_pin.base.sandbox import PF_USER_WORKER, GuestTopology, ProcessKey, Task, Vmm
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import ThreadRole
from kata_pin.vmm.kinds import NamedRole
from kata_pin.vmm.roles import MAX_TID_STEP, creation_order, guess

PID = 100
_OTHER = NamedRole(ThreadRole.EMULATOR)


def _vcpu(index: int) -> NamedRole:
    return NamedRole(ThreadRole.VCPU, vcpu=index)


def _io(name: str) -> NamedRole:
    return NamedRole(ThreadRole.IOTHREAD, iothread=name)


def _task(tid: int, starttime: int = 50, flags: int = 0) -> Task:
    return Task(ThreadKey(PID, tid, starttime), "qemu-system-x86", flags, EMPTY, EMPTY, "/")


def _vmm(boot: int = 2, iothreads: int = 1) -> Vmm:
    return Vmm(
        "qemu",
        ProcessKey(PID, 50),
        1,
        "/usr/bin/qemu-system-x86_64",
        "",
        guest=GuestTopology(boot=boot, maximum=8, sockets=8),
        iothreads=tuple(f"iot{n}" for n in range(iothreads)),
    )


def _said(vmm: Vmm, tasks: list[Task], known: dict[int, int] | None = None) -> dict[int, NamedRole]:
    keys = {task.key.tid: task.key for task in tasks}
    by_key = {keys[tid]: index for tid, index in (known or {}).items()}
    return {key.tid: said for key, said in guess(vmm, tasks, by_key, monitor=True).items()}


MAIN, RCU, IOT, MON, CPU0, CPU1 = (_task(PID + n) for n in range(6))
BOOTED = [MAIN, RCU, IOT, MON, CPU0, CPU1]


def test_an_exact_fit_names_all() -> None:
    """Main loop, call_rcu, iothread, monitor, vCPUs in index order."""
    assert _said(_vmm(), BOOTED) == {
        100: _OTHER,
        101: _OTHER,
        102: _io("iot0"),
        103: _OTHER,
        104: _vcpu(0),
        105: _vcpu(1),
    }


def test_listing_order_does_not_matter() -> None:
    """Threads are sorted by start time first: tids may have wrapped around since."""
    wrapped = [_task(7, starttime=60), *BOOTED[:-1]]
    assert _said(_vmm(), wrapped)[7] == _vcpu(1)


@pytest.mark.parametrize(
    "tasks",
    [
        pytest.param([*BOOTED, _task(106)], id="one more: a worker or a hotplugged vCPU"),
        pytest.param(BOOTED[:-1], id="one less"),
        pytest.param([], id="none"),
        pytest.param(BOOTED[1:], id="the main thread is gone"),
        pytest.param([*BOOTED[:-1], _task(105 + MAX_TID_STEP)], id="tids may have wrapped"),
    ],
)
def test_anything_else_names_nothing(tasks: list[Task]) -> None:
    """With no vCPU known from elsewhere, one thread too many or too few is too doubtful."""
    assert _said(_vmm(), tasks) == {}


def test_known_vcpus_anchor_the_rest() -> None:
    """One boot vCPU known where it should be proves the head, whatever came later."""
    later = [*BOOTED, _task(106), _task(107)]
    said = _said(_vmm(), later, {104: 0})
    assert said[105] == _vcpu(1)
    assert said[102] == _io("iot0")
    assert 106 not in said


def test_a_known_vcpu_elsewhere_ends_it() -> None:
    """A worker that was alive before the vCPUs shifts them: nothing is said, iothreads included."""
    shifted = [*BOOTED[:4], _task(104), _task(105), _task(106)]
    assert _said(_vmm(), shifted, {105: 0, 106: 1}) == {}


def test_hotplugged_vcpus_do_not_anchor() -> None:
    """A known vCPU above the boot ones says nothing about the places of the boot ones."""
    assert _said(_vmm(), [*BOOTED, _task(106)], {106: 7}) == {}


def test_kernel_workers_stand_anywhere() -> None:
    """vhost and KVM workers inside QEMU are left out of the count."""
    worker = _task(104, flags=PF_USER_WORKER)
    shifted = [*BOOTED[:4], worker, _task(105), _task(106)]
    assert _said(_vmm(), shifted)[105] == _vcpu(0)
    assert creation_order([worker]) == []


def test_without_a_number_of_vcpus_nothing_is_said() -> None:
    """A QEMU whose -smp could not be read gets no guess."""
    assert _said(_vmm(boot=0), BOOTED) == {}
