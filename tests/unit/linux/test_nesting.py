"""Times of interrupts that interrupt each other."""

from __future__ import annotations

from kata_pin.linux.tracepoints import HARDWARE, SOFTIRQ, Key, Nesting

TIMER: Key = (HARDWARE, "local_timer", -1)
DISK: Key = (HARDWARE, "device", 36)
RCU: Key = (SOFTIRQ, "RCU", -1)


def sums(nested: Nesting) -> dict[Key, tuple[int, int, int]]:
    return {key: (one.times, one.total_ns, one.longest_ns) for key, one in nested.sums.items()}


def test_time_belongs_to_the_innermost() -> None:
    """A softirq of 100 ns that a timer interrupted for 30 ns has 70 ns of its own."""
    nested = Nesting()
    nested.begin(RCU, 0)
    nested.begin(TIMER, 20)
    nested.end(TIMER, 50)
    nested.begin(DISK, 60)
    nested.end(DISK, 65)
    nested.end(RCU, 100)
    nested.begin(RCU, 200)
    nested.end(RCU, 210)
    assert sums(nested) == {TIMER: (1, 30, 30), DISK: (1, 5, 5), RCU: (2, 75, 65)}


def test_what_was_not_seen_whole_does_not_count() -> None:
    """An end without a beginning, a beginning without an end, and what a loss cut."""
    nested = Nesting()
    nested.end(TIMER, 5)
    nested.begin(DISK, 10)
    nested.begin(TIMER, 20)
    nested.end(DISK, 40)
    assert sums(nested) == {DISK: (1, 30, 30)}
    nested.begin(TIMER, 50)
    nested.forget()
    nested.end(TIMER, 60)
    assert TIMER not in nested.sums
