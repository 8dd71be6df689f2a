"""Exclusive pCPUs that others claim or may use."""

from __future__ import annotations

from kata_pin.model.placement import Placement, SandboxMask
from kata_pin.policy.conflicts import PF_NO_SETAFFINITY, conflicts, intruders
from tests.support.world import cpus, task


def claiming(**exclusive: str) -> dict[str, Placement]:
    """Return placements by sandbox with these exclusive CPUs."""
    return {
        name: Placement(name, SandboxMask(cpus(text), exclusive=cpus(text)))
        for name, text in exclusive.items()
    }


def test_no_conflict() -> None:
    """Sandboxes with CPUs of their own do not conflict; one without a mask neither."""
    placements = claiming(p="4-5", q="6-7") | {"r": Placement("r", SandboxMask(None))}
    assert conflicts(placements) == ()


def test_two_and_three_claimants() -> None:
    """Each set of claimants is one conflict with all its CPUs."""
    found = conflicts(claiming(q="5-7", p="4-6", r="6"))
    assert [(str(one.cpus), one.sandboxes) for one in found] == [
        ("5", ("p", "q")),
        ("6", ("p", "q", "r")),
    ]


def test_intruders() -> None:
    """A thread of the host, or of another sandbox, on an exclusive CPU is an intruder."""
    host = task(1, on="0-5", tgid=1)
    other = task(20, on="4", tgid=20)
    own = task(30, on="4-5", tgid=30)
    beside = task(40, on="0-3,8-15", tgid=40)
    owner_of = {other.key: "q", own.key: "p"}
    found = intruders(claiming(p="4-5", q="6"), [beside, own, other, host], owner_of)
    assert [(one.task.key.tid, str(one.cpus), one.sandbox_id, one.owner) for one in found] == [
        (1, "4-5", "p", ""),
        (20, "4", "p", "q"),
    ]


def test_one_thread_intrudes_on_each_sandbox() -> None:
    """A wide thread is an intruder in every sandbox it reaches."""
    found = intruders(claiming(p="4", q="6"), [task(1)], {})
    assert [(one.sandbox_id, str(one.cpus)) for one in found] == [("p", "4"), ("q", "6")]


def test_claimants_of_one_cpu_do_not_excuse_each_other() -> None:
    """On a pCPU that two sandboxes claim, each one's threads intrude on the other."""
    one = task(20, on="4")
    found = intruders(claiming(p="4", q="4"), [one], {one.key: "p"})
    assert [(entry.sandbox_id, entry.owner) for entry in found] == [("q", "p")]


def test_fixed_kernel_threads_are_no_intruders() -> None:
    """ksoftirqd/4 can not be moved by anybody; an unbound kernel thread can."""
    fixed = task(35, on="4", tgid=35, flags=PF_NO_SETAFFINITY | 0x200000)
    unbound = task(36, on="4", tgid=36, flags=0x200000)
    found = intruders(claiming(p="4"), [fixed, unbound], {})
    assert [one.task.key.tid for one in found] == [36]
