"""Scheduling classes in the broker: which names and which masks, before the kernel is asked."""

from __future__ import annotations

import os
from errno import EACCES, ESTALE
from pathlib import Path

import pytest

from kata_pin.broker.protocol import Change
from kata_pin.broker.scheduling import set_classes

RR = os.SCHED_RR


def asked(
    proc: Path, comm: str, cpus: set[int], policy: int = RR, starttime: int = 5
) -> tuple[int, list[tuple[int, int, int]]]:
    """Ask for a class of priority 1, or 0; return the errno, and what the kernel was asked."""
    task = proc / "10/task/11"
    task.mkdir(parents=True, exist_ok=True)
    (task / "comm").write_text(f"{comm}\n")
    (task / "stat").write_text(f"11 ({comm}) S {'0 ' * 18}5 0\n")
    made: list[tuple[int, int, int]] = []
    (done,) = set_classes(
        [Change(10, 11, starttime, 0, frozenset())],
        policy,
        int(policy == RR),
        str(proc),
        set_one=lambda tid, given, param: made.append((tid, given, param.sched_priority)),
        affinity=lambda _: cpus,
    )
    return done.errno, made


@pytest.mark.parametrize(
    "comm", ["CPU 0/KVM", "CPU 12/TCG", "vcpu3", "fc_vcpu 0", "fc_vcpu0", "db_vcpu1"]
)
def test_names_of_vcpus(tmp_path: Path, comm: str) -> None:
    """Those of every VMM that is known; what the thread starts does not inherit the class."""
    assert asked(tmp_path, comm, {4}) == (0, [(11, RR | os.SCHED_RESET_ON_FORK, 1)])


@pytest.mark.parametrize("comm", ["", "CPU 0/KVM2", "xCPU 0/KVM", "CPU /KVM", "vcpu", "vcpu1x"])
def test_names_of_others(tmp_path: Path, comm: str) -> None:
    """Refused before the kernel is asked; an ordinary class is none to refuse."""
    assert asked(tmp_path, comm, {4}) == (EACCES, [])
    assert asked(tmp_path, comm, {4, 5}, os.SCHED_BATCH) == (0, [(11, os.SCHED_BATCH, 0)])


def test_a_vcpu_with_several_cpus_or_another_thread(tmp_path: Path) -> None:
    """A class that leaves a CPU to nobody is for a thread of one CPU, and for that thread."""
    assert asked(tmp_path, "CPU 0/KVM", {4, 5}) == (EACCES, [])
    assert asked(tmp_path, "CPU 0/KVM", {4}, starttime=6) == (ESTALE, [])
