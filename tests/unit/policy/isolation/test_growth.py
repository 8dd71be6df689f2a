"""What two looks at the counters say; the figures are those measured on Linux 6.12."""

from __future__ import annotations

import pytest

from kata_pin.model.measured.counters import CpuRun, TaskRun
from kata_pin.policy.isolation.growth import Growth, Look, growth

S = 1_000_000_000
NONE = TaskRun(0, 0, 0)


def test_a_busy_thread_waits_for_everybody_else() -> None:
    """Its wait grew by what a kernel histogram counted of the others: 17,205,530 ns."""
    before = Look(0, {7: NONE})
    after = Look(5 * S, {7: TaskRun(4_982_794_470, 17_205_530, 15)})
    found = growth(before, after)
    assert found == Growth(5 * S, 17_205_530, 0, None, 4_982_794_470)
    assert found.others_ns == 17_205_530
    assert found.percent == pytest.approx(0.3441106)


def test_slices_that_are_not_its_own_are_others() -> None:
    """Of 30 slices 15 were the thread's: 15 others, also while it slept."""
    before = Look(0, {7: NONE}, CpuRun(0, 0, 0))
    after = Look(5 * S, {7: TaskRun(S, 0, 15)}, CpuRun(S + 20_000_000, 0, 30))
    assert growth(before, after) == Growth(5 * S, 0, 20_000_000, 15, S)


def test_counts_that_agree_are_nobody_elses() -> None:
    """Times of a pCPU are late while a task stays on it: without a slice more nobody was there."""
    before = Look(0, {7: NONE}, CpuRun(0, 0, 0))
    after = Look(5 * S, {7: TaskRun(S, 0, 15)}, CpuRun(4 * S, 0, 15))
    assert growth(before, after) == Growth(5 * S, 0, 0, 0, S)
    late = Look(5 * S, {7: TaskRun(5 * S, 0, 1)}, CpuRun(S, 0, 4))
    assert growth(before, late) == Growth(5 * S, 0, 0, 3, 5 * S)


def test_never_more_than_the_time_that_passed() -> None:
    """Two threads that wait for the same time count once."""
    before = Look(0, {7: NONE, 8: NONE})
    after = Look(S, {7: TaskRun(0, S, 1), 8: TaskRun(0, S, 1)})
    found = growth(before, after)
    assert found is not None
    assert (found.others_ns, found.percent) == (S, 100.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Look(0, {7: NONE}), Look(0, {7: NONE})),
        (Look(0, {7: NONE}), Look(S, {8: NONE})),
        (Look(0, {}), Look(S, {})),
        (Look(0, {7: TaskRun(5, 5, 5)}), Look(S, {7: NONE})),
    ],
)
def test_what_says_nothing(before: Look, after: Look) -> None:
    """No time passed, other threads, no threads, or counters that shrank."""
    assert growth(before, after) is None
