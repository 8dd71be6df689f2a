"""Adding up slices: no gap, no double time, and unknown where records are missing."""

from __future__ import annotations

from kata_pin.base.counters import CROWD, CpuWindow, RanTask
from kata_pin.linux.perf import DEAD, MOST_TASKS, SILENT_NS, Came, Event, Left, Lost, Ran, RunSlices


def window(
    *events: Event, end: int = 1000, start: int = 0, length: int = 1000, parts: int = 10
) -> CpuWindow:
    slices = RunSlices(1, start, length, parts)
    slices.add(events)
    return slices.end(end, len(events))


def left(time_ns: int, tid: int, next_tid: int) -> Left:
    return Left(time_ns, tid, tid, next_tid, next_tid)


def totals(found: CpuWindow) -> dict[int, tuple[int, int, int]]:
    return {one.tid: (one.slices, one.ran_ns, one.longest_ns) for one in found.tasks}


def task(found: CpuWindow, tid: int) -> RanTask:
    return next(one for one in found.tasks if one.tid == tid)


def test_the_sums_have_no_gap() -> None:
    """The first slice counts from the beginning, the last one to the end."""
    found = window(left(100, 7, 8), left(150, 8, 7), left(400, 7, 0))
    assert totals(found) == {7: (2, 350, 250), 8: (1, 50, 50), 0: (1, 600, 600)}
    assert sum(one.ran_ns for one in found.tasks) == found.length_ns == 1000
    assert (found.problem, found.unknown_ns) == ("", 0)


def test_a_record_after_the_end() -> None:
    """What was recorded while recording was stopped makes the window longer, not the sum wrong."""
    found = window(left(100, 7, 8), left(1020, 8, 7))
    assert totals(found) == {7: (2, 100, 100), 8: (1, 920, 920)}
    assert sum(one.ran_ns for one in found.tasks) == found.length_ns == 1020


def test_a_wait_lasts_from_a_preemption_to_the_next_slice() -> None:
    """A task that sleeps does not wait; one that still waits at the end has waited till then."""
    taken = left(100, 7, 8)._replace(preempted=True)
    found = window(taken, left(150, 8, 7), left(400, 7, 8), left(700, 8, 7))
    seven, eight = task(found, 7), task(found, 8)
    assert (seven.preempted, seven.longest_wait_ns) == (1, 50)
    assert (eight.preempted, eight.longest_wait_ns) == (0, 0)
    still = task(window(taken, end=1000), 7)
    assert (still.preempted, still.longest_wait_ns) == (1, 900)


def test_who_never_leaves_is_found_by_a_sample() -> None:
    """Without a switch the whole window is the task's that a sample found; else nobody's."""
    assert totals(window(Ran(250, 7, 7))) == {7: (1, 1000, 1000)}
    found = window()
    assert (totals(found), found.unknown_ns) == ({}, 1000)
    assert found.problem == "who ran is not known for a part of it"


def test_a_task_that_died_and_one_without_records() -> None:
    """Both are known by their neighbours' records."""
    died = window(left(100, 7, 8), left(300, DEAD, 7))
    assert totals(died) == {7: (2, 800, 700), 8: (1, 200, 200)}
    silent = window(left(100, 7, 8), Came(300, 7, 7, 8, 8))
    assert totals(silent) == {7: (2, 800, 700), 8: (1, 200, 200)}
    assert (died.problem, silent.problem) == ("", "")


def test_a_thread_that_executes_a_program_changes_its_tid() -> None:
    """It leaves as the first thread of its process; one of another process contradicts."""
    events = (left(100, 7, 20)._replace(next_pid=9), left(300, 9, 7))
    found = window(*events)
    assert totals(found) == {7: (2, 800, 700), 9: (1, 200, 200)}
    assert (found.problem, found.unknown_ns) == ("", 0)
    found = window(Came(100, 20, 9, 7, 7), events[1])
    assert found.unknown_ns == 0
    found = window(Ran(50, 20, 9), left(100, 9, 7))
    assert totals(found) == {9: (1, 100, 100), 7: (1, 900, 900)}
    found = window(left(100, 7, 20)._replace(next_pid=9), left(300, 21, 7)._replace(pid=9))
    assert found.unknown_ns == 200, "two threads of a process, of which neither is the first"


def test_records_that_contradict_each_other() -> None:
    """Time for which two tasks are named is nobody's, and the window is not whole."""
    for event in (left(300, 9, 7), Came(300, 7, 7, 9, 9)):
        found = window(left(100, 7, 8), event)
        assert (totals(found), found.unknown_ns) == ({7: (2, 800, 700)}, 200)
        assert found.problem


def test_lost_records_make_time_unknown() -> None:
    """Between the last record before a loss and the first leave after it nobody is known."""
    found = window(left(100, 7, 8), left(200, 8, 7), Lost(5), left(600, 9, 7), Lost(1))
    assert totals(found) == {7: (1, 100, 100), 8: (1, 100, 100)}
    assert found.lost == 6
    assert found.unknown_ns == 400 + 400
    assert found.problem == "6 records were lost"


def test_records_before_the_window() -> None:
    """A switch between enabling the event and the window's beginning only says who came."""
    found = window(left(90, 6, 7), left(300, 7, 0), start=100)
    assert totals(found) == {7: (1, 200, 200), 0: (1, 700, 700)}


def test_parts_of_the_window() -> None:
    """A slice over several parts is in each; what comes late is in the last."""
    found = window(left(150, 7, 8), left(350, 8, 0), end=1200)
    assert task(found, 7).parts == ((0, 100), (1, 50))
    assert task(found, 8).parts == ((1, 50), (2, 100), (3, 50))
    assert dict(task(found, 0).parts)[9] == 300
    for one in found.tasks:
        assert sum(ns for _, ns in one.parts) == one.ran_ns


def test_buckets() -> None:
    """Slices are counted by length, each bucket twice as wide as the one before."""
    found = window(left(1000, 7, 8), left(2024, 8, 7), left(10_000, 7, 0), end=20_000)
    assert task(found, 7).buckets[:5] == (1, 0, 0, 1, 0)
    assert task(found, 8).buckets[:3] == (0, 1, 0)


def test_silence_is_no_proof() -> None:
    """A CPU whose event says nothing for long may have been offline."""
    found = window(Ran(250, 7, 7), end=SILENT_NS + 1000, length=SILENT_NS + 1000)
    assert found.problem == "no record for 1.3 s: the pCPU may have been offline"


def test_tasks_beyond_the_most_are_one() -> None:
    """A storm of short tasks takes no memory without end, and loses no time."""
    count = MOST_TASKS + 100
    events = [left(number + 1, number + 1, number + 2) for number in range(count)]
    found = window(*events, end=count, length=count)
    assert len(found.tasks) == MOST_TASKS + 1
    assert totals(found)[CROWD][1] == 100
    assert sum(one.ran_ns for one in found.tasks) == count


def test_times_of_no_kernel_end() -> None:
    """A time far in the future takes no time to add."""
    found = window(left(2**64 - 1, 7, 0), left(1, 0, 7))
    assert task(found, 7).ran_ns >= 2**64 - 1
