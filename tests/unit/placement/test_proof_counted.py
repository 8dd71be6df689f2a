"""What counters alone prove: little, and never more than they say."""

from __future__ import annotations

import pytest

from kata_pin.base.counters import CpuRun, CpuWindow, Measured
from kata_pin.base.threads import TaskRun
from kata_pin.base.values import Method, Verdict
from kata_pin.placement.owners import Owner
from kata_pin.placement.proof import Counted, judge_counts

S, MS = 1_000_000_000, 1_000_000
OWNER = Owner(4, "p1", "shop/web", own={7: "vcpu 0"}, alone=frozenset({7}))


def judged(
    ran: int,
    waited: int,
    slices: int,
    cpu: tuple[int, int] | None = None,
    *,
    owner: Owner = OWNER,
    most: float = 0.0,
    problem: str = "",
) -> Counted:
    """Judge a second in which its thread, and its pCPU (run time, slices), did this."""
    times = {tid: (TaskRun(5, 5, 5), TaskRun(5 + ran, 5 + waited, 5 + slices)) for tid in owner.own}
    runs = {} if cpu is None else {4: (CpuRun(9, 0, 9), CpuRun(9 + cpu[0], 0, 9 + cpu[1]))}
    window = CpuWindow(4, 0, S, problem=problem)
    method = Method.WAIT if cpu is None else Method.SCHEDSTAT
    return judge_counts(Measured(method, {4: window}, times=times, cpu_runs=runs), owner, most)


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ((S, 0, 0), Verdict.PROVED),  # it never left
        ((S // 2, 0, 20), Verdict.UNPROVED),  # who knows, while it slept
        ((S - MS // 2, MS // 2, 20), Verdict.UNPROVED),  # kernel threads, perhaps
        ((S // 2, S // 2, 20), Verdict.VIOLATED),
    ],
)
def test_waits(numbers: tuple[int, int, int], verdict: Verdict) -> None:
    """A thread that ran all the time was alone; one that waited long was not."""
    assert judged(*numbers).verdict is verdict


@pytest.mark.parametrize(
    ("numbers", "cpu", "verdict"),
    [
        ((S // 2, 0, 20), (S // 2, 20), Verdict.PROVED),
        ((S // 2, 0, 20), (S // 2 + MS // 10, 32), Verdict.UNPROVED),
        ((S // 2, 0, 20), (S // 2 + 20 * MS, 32), Verdict.VIOLATED),
        ((S // 2, 20 * MS, 20), (S // 2, 20), Verdict.VIOLATED),
        ((S // 2, 0, 20), (S // 2 + 20 * MS, 20), Verdict.UNPROVED),  # there since before
        ((0, 0, 0), (0, 0), Verdict.UNPROVED),  # it slept all the time
    ],
)
def test_slices(numbers: tuple[int, int, int], cpu: tuple[int, int], verdict: Verdict) -> None:
    """Slices that are not its own are others'; none at all, and it was there: nobody else was."""
    assert judged(*numbers, cpu).verdict is verdict


def test_what_cannot_be_told_apart_proves_nothing() -> None:
    """Threads that may run elsewhere, threads without counters, a pCPU that went offline."""
    wide = Owner(4, "p1", "w", own={7: "vcpu 0", 8: "emulator"}, alone=frozenset({7}))
    assert judged(S // 2, 0, 20, (S // 2, 20), owner=wide).verdict is Verdict.UNPROVED
    nobody = Owner(4, "p1", "w", own={8: "emulator"}, alone=frozenset())
    assert judged(S, 0, 0, owner=nobody).verdict is Verdict.UNPROVED
    offline = judged(S, 0, 0, problem="it is offline")
    assert (offline.verdict, offline.reason) == (Verdict.UNPROVED, "it is offline")


def test_two_threads_of_the_owner_wait_for_each_other() -> None:
    """That is no violation; slices of others still are."""
    two = Owner(4, "p1", "w", own={7: "vcpu 0", 8: "vcpu 1"}, alone=frozenset({7, 8}))
    assert judged(S // 2, S // 2, 20, owner=two).verdict is Verdict.PROVED
    assert judged(S // 4, S // 2, 20, (S // 2 + 50 * MS, 60), owner=two).verdict is Verdict.VIOLATED


def test_what_is_accepted() -> None:
    """A limit above what cannot be named moves the violation, not the proof."""
    assert judged(S // 2, 20 * MS, 20, (S // 2, 20), most=5.0).verdict is Verdict.UNPROVED
