"""Rates between two samples: what is certain, what is unknown, and what the kernel hides."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.counters import (
    TICK_NS,
    CacheUse,
    CpuRun,
    CpuSample,
    CpuTimes,
    InterruptKind,
    Sample,
    Throttling,
    rates_between,
)
from kata_pin.base.threads import TaskMoves, TaskRun, TaskSample, ThreadKey
from kata_pin.options.isolation.rates import Window

VCPU, OTHER = ThreadKey(7, 7, 1), ThreadKey(7, 8, 1)
SECOND = 1_000_000_000


def task(
    ran: int,
    waited: int = 0,
    slices: int = 0,
    *,
    ready: bool = True,
    moves: TaskMoves | None = None,
) -> TaskSample:
    return TaskSample(TaskRun(ran, waited, slices), moves, 0, ready)


def sample(second: int, tasks: dict[ThreadKey, TaskSample], **cpu: Any) -> Sample:
    facts = CpuSample(None, None, None, None)._replace(**cpu)
    at_ns = second * SECOND
    after = {key: one.run for key, one in tasks.items()}
    return Sample(at_ns, tasks, at_ns, at_ns, {0: facts}, after)


def test_run_and_wait_are_shares_of_the_window() -> None:
    """Half of two seconds on a CPU, a quarter waiting."""
    before = sample(0, {VCPU: task(5, 7, moves=TaskMoves(1, 4))})
    after = sample(2, {VCPU: task(SECOND + 5, SECOND // 2 + 7, 9, moves=TaskMoves(5, 4))})
    found = Window(before, after).tasks[VCPU]
    assert (found.cpu_percent, found.wait_percent) == (50, 25)
    assert (found.preemptions, found.migrations) == (2, 0)


def test_what_a_kernel_does_not_tell_is_unknown() -> None:
    """No number is not 0."""
    before = sample(0, {VCPU: task(0, moves=TaskMoves(1, None))})
    after = sample(1, {VCPU: task(1, moves=TaskMoves(2, None)), OTHER: task(1)})
    found = Window(before, after)
    assert found.tasks[VCPU].migrations is None
    assert found.tasks[VCPU].preemptions == 1
    assert OTHER not in found.tasks
    cpu = found.cpu(0, alone=[VCPU], roaming=[])
    assert (cpu.foreign_switches, cpu.steal_percent, cpu.interrupts, cpu.softirqs) == (None,) * 4


def test_a_starving_thread_waits_all_the_time() -> None:
    """The kernel adds its wait only when it runs again: nothing has grown."""
    before, after = sample(0, {VCPU: task(5, 5, 5)}), sample(1, {VCPU: task(5, 5, 5)})
    found = Window(before, after)
    assert found.tasks[VCPU].wait_percent == 100
    assert found.tasks[VCPU].starving
    assert found.cpu(0, alone=[VCPU], roaming=[]).foreign_percent == 100
    asleep = sample(1, {VCPU: task(5, 5, 5, ready=False)})
    assert Window(before, asleep).tasks[VCPU].wait_percent == 0


def test_the_wait_of_former_windows_does_not_count_twice() -> None:
    """A thread that starved for five seconds gets all of its wait at once."""
    before, after = sample(5, {VCPU: task(0)}), sample(6, {VCPU: task(SECOND // 4, 5 * SECOND, 1)})
    assert Window(before, after).tasks[VCPU].wait_percent == 75


def test_a_counter_that_runs_back_is_no_growth() -> None:
    """Some do, by a little, when a CPU goes offline."""
    before, after = sample(0, {VCPU: task(9, 9, 9)}), sample(1, {VCPU: task(8, 8, 8, ready=False)})
    found = Window(before, after).tasks[VCPU]
    assert (found.cpu_percent, found.wait_percent) == (0, 0)


def test_the_wait_of_a_lone_thread_is_foreign_time() -> None:
    """The recorded equality: 12,979,696 ns of wait are 12,979,696 ns of kworker and ksoftirqd."""
    before = sample(0, {VCPU: task(0)})
    after = sample(5, {VCPU: task(5 * SECOND - 12_979_696, 12_979_696, 15)})
    found = Window(before, after).cpu(0, alone=[VCPU], roaming=[])
    assert found.foreign_percent == pytest.approx(100 * 12_979_696 / (5 * SECOND))


@pytest.mark.parametrize(
    ("roaming", "throttled", "foreign"), [([], 0.0, 40), ([OTHER], 0.0, 15), ([], 30.0, 10)]
)
def test_only_what_is_certain_is_foreign(
    roaming: list[ThreadKey], throttled: float, foreign: float
) -> None:
    """The owner's own threads may have run there, and a quota may have stopped it."""
    before = sample(0, {VCPU: task(0), OTHER: task(0)})
    after = sample(1, {VCPU: task(0, SECOND * 4 // 10, 3), OTHER: task(SECOND // 4, 0, 1)})
    found = Window(before, after).cpu(0, alone=[VCPU], roaming=roaming, throttled=throttled)
    assert found.foreign_percent == pytest.approx(foreign)


def test_a_busy_cpu_with_idle_owners_is_in_foreign_use() -> None:
    """A vCPU that sleeps does not wait; the CPU is busy all the same. Two ticks are doubt."""
    before = sample(0, {VCPU: task(0, ready=False)}, times=CpuTimes(1000, 0, 0))
    after = sample(1, {VCPU: task(0, ready=False)}, times=CpuTimes(1060, 0, 0))
    found = Window(before, after).cpu(0, alone=[VCPU], roaming=[])
    assert found.foreign_percent == pytest.approx(38)
    quiet = sample(1, {VCPU: task(0, ready=False)}, times=CpuTimes(1098, 0, 0))
    assert Window(before, quiet).cpu(0, alone=[VCPU], roaming=[]).foreign_percent == 0


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(sample(1, {VCPU: task(0)}, times=CpuTimes(1000, 100, 0)), id="interrupts"),
        pytest.param(sample(1, {VCPU: task(0)}, times=CpuTimes(1000, 0, 100)), id="steal"),
        pytest.param(
            replace(
                sample(1, {VCPU: task(0)}, times=CpuTimes(1000, 0, 0)),
                cpus_from_ns=SECOND // 50,
            ),
            id="read late",
        ),
        pytest.param(
            replace(
                sample(1, {VCPU: task(0)}, times=CpuTimes(1000, 0, 0)),
                tasks_after={VCPU: TaskRun(SECOND, 0, 1)},
            ),
            id="the owner ran while the CPU was read",
        ),
    ],
)
def test_a_busy_cpu_without_foreign_tasks(after: Sample) -> None:
    """What cannot be told from foreign work is none."""
    before = sample(0, {VCPU: task(9, ready=False)}, times=CpuTimes(1000, 0, 0))
    found = Window(before, after).cpu(0, alone=[VCPU], roaming=[])
    assert found.foreign_percent == 0


def test_what_a_hypervisor_took_is_shown() -> None:
    """On a virtual node it explains jitter that nobody here causes."""
    before = sample(0, {}, times=CpuTimes(1000, 0, 0))
    after = sample(1, {}, times=CpuTimes(1060, 0, 5))
    found = Window(before, after).cpu(0, alone=[], roaming=[])
    assert found.steal_percent == pytest.approx(100 * 5 * TICK_NS / SECOND)


def test_foreign_switches_are_the_difference_of_slices() -> None:
    """The recorded equality: 30 - 15 = 15 = what a histogram of sched_switch named."""
    before = sample(0, {VCPU: task(0, slices=100)}, run=CpuRun(0, 0, 1000))
    after = sample(5, {VCPU: task(1, slices=115)}, run=CpuRun(0, 0, 1030))
    after = replace(after, tasks_after={VCPU: TaskRun(1, 0, 115)})
    assert Window(before, after).cpu(0, alone=[VCPU], roaming=[]).foreign_switches == 3


def test_own_slices_while_reading_are_never_foreign() -> None:
    """The owner ran again between the readings: at least so many switches were others'."""
    before = sample(0, {VCPU: task(0, slices=100)}, run=CpuRun(0, 0, 1000))
    after = sample(1, {VCPU: task(1, slices=110)}, run=CpuRun(0, 0, 1012))
    after = replace(after, tasks_after={VCPU: TaskRun(1, 0, 112)})
    assert Window(before, after).cpu(0, alone=[VCPU], roaming=[]).foreign_switches == 0
    unread = replace(after, tasks_after={})
    assert Window(before, unread).cpu(0, alone=[VCPU], roaming=[]).foreign_switches is None


def test_interrupts_are_rates_by_kind() -> None:
    """Kinds and names as the document has them."""
    counts = dict.fromkeys(InterruptKind, 10)
    before = sample(0, {}, interrupts=counts, softirqs={"RCU": 5})
    after = sample(
        2, {}, interrupts={**counts, InterruptKind.TICK: 510}, softirqs={"RCU": 25, "HI": 0}
    )
    found = Window(before, after).cpu(0, alone=[], roaming=[])
    assert found.interrupts is not None
    assert found.interrupts["tick"] == 250
    assert found.interrupts["device"] == 0
    assert found.softirqs == {"RCU": 10, "HI": 0}


def test_throttling_is_a_share_of_the_window() -> None:
    """Several cgroups may have been stopped at once: never more than all of it."""
    before = replace(sample(0, {}), throttled={VCPU: Throttling(1, 100)})
    after = replace(sample(1, {}), throttled={VCPU: Throttling(3, SECOND // 2 + 100)})
    assert Window(before, after).throttled_percent(VCPU) == 50
    assert Window(before, after).throttled_percent(OTHER) is None


def test_bandwidth_of_a_group() -> None:
    """A rate over the exact time; none without both readings, or for a group made anew."""
    first = CacheUse(1_000_000_000, 5, total=1000, local=None)
    last = CacheUse(3_000_000_000, 7, total=5000, local=10)
    assert rates_between(first, last) == (2000.0, None)
    assert rates_between(last, first) == (None, None)
    assert rates_between(None, last) == (None, None)
    assert rates_between(first, last._replace(total=1)) == (None, None)
