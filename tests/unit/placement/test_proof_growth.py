"""What two looks at the counters say; the figures are those measured on Linux 6.12."""

from __future__ import annotations

import pytest

from kata_pin.base.counters import CpuRun, CpuTimes
from kata_pin.base.threads import TaskRun
from kata_pin.placement.proof import CpuLook, Growth, Look, growth

S = 1_000_000_000
NONE = TaskRun(0, 0, 0)
ZERO = CpuLook(0, CpuRun(0, 0, 0), CpuTimes(0, 0, 0))


def counted(
    run: CpuRun | None, times: CpuTimes | None = None, at_ns: int = 5 * S
) -> tuple[CpuLook, CpuLook]:
    """Return two looks at a pCPU whose counters were 0 at the first."""
    first = CpuLook(0, ZERO.run if run else None, ZERO.times if times else None)
    return first, CpuLook(at_ns, run, times)


def test_a_busy_thread_waits_for_everybody_else() -> None:
    """Its wait grew by what a kernel histogram counted of the others: 17,205,530 ns."""
    before = Look(0, {7: NONE})
    after = Look(5 * S, {7: TaskRun(4_982_794_470, 17_205_530, 15)})
    found = growth(before, after, {7})
    assert found == Growth(5 * S, 17_205_530, 0, None, 4_982_794_470)
    assert found.others_ns == 17_205_530
    assert found.percent == pytest.approx(0.3441106)


def test_slices_that_are_not_its_own_are_others() -> None:
    """Of 30 slices 15 were the thread's: 15 others, also while it slept."""
    after = Look(5 * S, {7: TaskRun(S, 0, 15)})
    cpu = counted(CpuRun(S + 20_000_000, 0, 30))
    assert growth(Look(0, {7: NONE}), after, {7}, cpu) == Growth(5 * S, 0, 20_000_000, 15, S)


def test_counts_that_agree_are_nobody_elses() -> None:
    """Times of a pCPU are late while a task stays on it: without a slice more nobody was there."""
    before = Look(0, {7: NONE})
    after = Look(5 * S, {7: TaskRun(S, 0, 15)})
    found = growth(before, after, {7}, counted(CpuRun(4 * S, 0, 15)))
    assert found == Growth(5 * S, 0, 0, 0, S)
    late = Look(5 * S, {7: TaskRun(5 * S, 0, 1)})
    found = growth(before, late, {7}, counted(CpuRun(S, 0, 4)))
    assert found == Growth(5 * S, 0, 0, 3, 5 * S)


def test_who_came_before_and_never_left() -> None:
    """The pCPU was not idle and its thread did not run: by ticks of 10 ms, of which two may lie."""
    same = Look(5 * S, {7: NONE})
    gone = growth(Look(0, {7: NONE}), same, {7}, counted(CpuRun(0, 0, 0), CpuTimes(100, 0, 0)))
    assert gone == Growth(5 * S, 0, 3_980_000_000, 0, doubtful_ns=3_980_000_000)
    busy = growth(Look(0, {7: NONE}), same, {7}, counted(CpuRun(0, 0, 0), CpuTimes(2, 0, 0)))
    assert busy == Growth(5 * S, 0, 4_960_000_000, 0)
    quiet = CpuTimes(idle=450, interrupts=30, steal=18)
    assert growth(Look(0, {7: NONE}), same, {7}, counted(None, quiet)) == Growth(5 * S, 0, 0, None)


def test_what_no_thread_is_charged_for_is_nobody_elses() -> None:
    """A vCPU that wakes 1,000 times in a second keeps its pCPU from being idle in between."""
    often = Look(5 * S, {7: TaskRun(S, 0, 5000)})
    found = growth(Look(0, {7: NONE}), often, {7}, counted(None, CpuTimes(380, 0, 0)))
    assert found is not None
    assert found.taken_ns == 0


def test_idle_time_is_nobody_elses() -> None:
    """A pCPU's run time is late: what its thread ran before the first look is no other task's."""
    after = Look(5 * S, {7: TaskRun(S, 0, 15)})
    cpu = counted(CpuRun(100 * S, 0, 16), CpuTimes(398, 0, 0))
    found = growth(Look(0, {7: NONE}), after, {7}, cpu)
    assert found is not None
    assert (found.slices, found.taken_ns) == (1, 40_000_000)


def test_time_before_the_first_look_is_nobody_elses() -> None:
    """A busy vCPU had its pCPU for 40 ms when the window began: 44.3 ms more than its own time.

    Figures of an emulated machine, where kernel threads had the pCPU ten times.
    """
    length, ran = 3_001_067_327, 2_996_971_556
    cpu = counted(CpuRun(ran + 44_348_015, 0, 21), at_ns=length)
    found = growth(Look(0, {7: NONE}), Look(length, {7: TaskRun(ran, 0, 11)}), {7}, cpu)
    assert found is not None
    assert (found.slices, found.others_ns) == (10, length - ran)


def test_only_the_threads_that_are_asked_for_are_own() -> None:
    """A look may hold more threads; one that is asked for has to be in both."""
    after = Look(S, {7: TaskRun(5, 6, 7), 8: TaskRun(1, 1, 1)})
    assert growth(Look(0, {7: NONE}), after, {7}) == Growth(S, 6, 0, None, 5)
    assert growth(Look(0, {7: NONE}), after, {7, 8}) is None


def test_never_more_than_the_time_that_passed() -> None:
    """A wait that began before the first look is added only when it ends."""
    found = growth(Look(0, {7: NONE}), Look(S, {7: TaskRun(0, 2 * S, 1)}), {7})
    assert found is not None
    assert (found.others_ns, found.percent) == (S, 100.0)


def test_several_threads_wait_for_each_other() -> None:
    """Their waits are theirs; what the pCPU counts beyond them still is others'."""
    before = Look(0, {7: NONE, 8: NONE})
    after = Look(5 * S, {7: TaskRun(3 * S, S, 10), 8: TaskRun(S, 3 * S, 10)})
    found = growth(before, after, {7, 8}, counted(CpuRun(4 * S, 0, 20)))
    assert found is not None
    assert (found.waited_ns, found.others_ns) == (4 * S, 0)
    found = growth(before, after, {7, 8}, counted(CpuRun(5 * S, 0, 25)))
    assert found is not None
    assert (found.slices, found.others_ns) == (5, S)


def test_time_of_an_idle_pcpu_that_may_be_that_of_interrupts() -> None:
    """It is neither idle nor a task's; a kernel that does not count slices leaves it open."""
    idle, same = CpuTimes(idle=400, interrupts=0, steal=0), Look(5 * S, {7: NONE})
    found = growth(Look(0, {7: NONE}), same, {7}, counted(CpuRun(2_000_000, 0, 9), idle))
    assert found == Growth(5 * S, 0, 980_000_000, 9, doubtful_ns=978_000_000)
    assert found.of_tasks == Growth(5 * S, 0, 2_000_000, 9)
    found = growth(Look(0, {7: NONE}), same, {7}, counted(None, idle))
    assert found == Growth(5 * S, 0, 980_000_000, None)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Look(0, {7: NONE}), Look(0, {7: NONE})),
        (Look(0, {7: NONE}), Look(S, {8: NONE})),
        (Look(0, {}), Look(S, {})),
        (Look(0, {7: TaskRun(5, 5, 5)}), Look(S, {7: NONE})),
        (Look(0, {7: TaskRun(5, 5, 5)}), Look(S, {7: TaskRun(4, 6, 6)})),
        (Look(0, {7: TaskRun(5, 5, 5)}), Look(S, {7: TaskRun(6, 4, 6)})),
        (Look(0, {7: TaskRun(5, 5, 5)}), Look(S, {7: TaskRun(6, 6, 4)})),
    ],
)
def test_what_says_nothing(before: Look, after: Look) -> None:
    """No time passed, other threads, no threads, or a counter that shrank, each alone."""
    assert growth(before, after, before.own) is None
