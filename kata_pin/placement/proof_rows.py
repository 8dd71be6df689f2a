"""The objects of the prove document, made from a measurement and its judgement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from msgspec.structs import replace

from kata_pin.base.counters import (
    BUCKETS,
    CROWD,
    IDLE_TASK,
    Measured,
    MeasuredInterrupt,
    SeenTask,
    bucket_end_us,
)
from kata_pin.base.counters import RanTask as Totals
from kata_pin.base.documents.measured import (
    HistogramBar,
    OwnThread,
    ProvedPcpu,
    RanInterrupt,
    RanTask,
    TimelinePart,
)
from kata_pin.base.threads import TaskRun
from kata_pin.base.values import Method, TaskClass, count
from kata_pin.placement import remedies
from kata_pin.placement.owners import FOREIGN, Known, Owner, place_of
from kata_pin.placement.proof import Counted, Judged
from kata_pin.placement.remedies import NodeConditions

MOST_TASKS: Final = 50
"""Tasks of one pCPU and class that are listed each by itself."""

ORDER: Final = (
    TaskClass.OTHER_SANDBOX,
    TaskClass.USER,
    TaskClass.UNKNOWN,
    TaskClass.UNBOUND_KERNEL,
    TaskClass.SAME_POD,
    TaskClass.PER_CPU_KERNEL,
)
"""The classes of other tasks, worst first."""


def pcpu(
    judged: Judged, owner: Owner, measured: Measured, known: Known, node: NodeConditions
) -> ProvedPcpu:
    """Return the object of one pCPU whose tasks are known by name."""
    window, timed = judged.window, measured.method is Method.PERF
    own = {one.tid: one for one in window.tasks if one.tid in owner.own}
    others = [one for one in window.tasks if one.tid != IDLE_TASK and one.tid not in owner.own]
    others.sort(key=lambda one: (ORDER.index(judged.classes[one.tid]), -one.ran_ns, one.tid))
    numbers = Counter(judged.classes[one.tid] for one in others)
    idle = next((one for one in window.tasks if one.tid == IDLE_TASK), None)
    interrupts = _interrupts(measured, owner.cpu, node)
    ran = judged.ran_ns

    def row(one: Totals) -> RanTask:
        kind = judged.classes[one.tid]
        task = measured.tasks.get(one.tid)
        return _task(one, task, kind, known, node, cpu=owner.cpu, timed=timed)

    return ProvedPcpu(
        cpu=owner.cpu,
        sandbox=owner.sandbox,
        pod=owner.pod,
        container=owner.container,
        verdict=judged.verdict,
        reason=judged.reason,
        window_s=window.length_ns / 1e9,
        records=window.records,
        lost=window.lost,
        own_ms=_ms(ran.get(TaskClass.OWN, 0)),
        pod_ms=_ms(ran.get(TaskClass.SAME_POD, 0)),
        foreign_ms=_ms(judged.foreign_ns),
        unavoidable_ms=_ms(ran.get(TaskClass.PER_CPU_KERNEL, 0)),
        idle_ms=_ms(judged.idle_ns) if timed else None,
        foreign_percent=round(judged.foreign_percent, 6),
        foreign_slices=judged.foreign_slices,
        interrupt_ms=None if interrupts is None else sum(one.total_ms for one in interrupts),
        own=tuple(
            own_thread(tid, label, measured.times.get(tid), own.get(tid, Totals(tid, 0, 0, 0)))
            for tid, label in owner.own.items()
        ),
        tasks=tuple(_listed(others, judged.classes, row)),
        tasks_left_out=sum(max(0, number - MOST_TASKS) for number in numbers.values()),
        interrupts=interrupts or (),
        histogram=tuple(_histogram(one for one in others if judged.classes[one.tid] in FOREIGN)),
        idle_timeline=_timeline(idle),
    )


def counted(judged: Counted, owner: Owner, measured: Measured) -> ProvedPcpu:
    """Return the object of one pCPU of which only counters are known."""
    window, others = judged.window, judged.others_ns
    return ProvedPcpu(
        cpu=owner.cpu,
        sandbox=owner.sandbox,
        pod=owner.pod,
        container=owner.container,
        verdict=judged.verdict,
        reason=judged.reason,
        window_s=window.length_ns / 1e9,
        records=0,
        lost=0,
        own_ms=None if judged.own_ns is None else _ms(judged.own_ns),
        pod_ms=None,
        foreign_ms=None if others is None else _ms(others),
        unavoidable_ms=None,
        idle_ms=None,
        foreign_percent=None if others is None else round(100 * others / window.length_ns, 6),
        foreign_slices=judged.slices,
        interrupt_ms=None,
        own=tuple(own_thread(*one, measured.times.get(one[0])) for one in owner.own.items()),
        tasks=(),
        tasks_left_out=0,
        interrupts=(),
        histogram=(),
        idle_timeline=(),
    )


def by_process(tasks: Iterable[RanTask]) -> list[tuple[RanTask, int]]:
    """Return tasks with those of one process summed, and how many each is; longest first.

    Name and thread id are those of the one that had the pCPU longest.
    """
    found: dict[tuple[int, int, str], tuple[RanTask, int]] = {}
    for task in sorted(tasks, key=lambda one: -(one.total_ms or 0.0)):
        key = (task.pid, 0 if task.pid else task.tid, task.task_class)
        most, threads = found.get(key, (task, 0))
        if threads:
            most = replace(
                most,
                slices=most.slices + task.slices,
                total_ms=_joined(sum, most.total_ms, task.total_ms),
                longest_ms=_joined(max, most.longest_ms, task.longest_ms),
            )
        found[key] = most, threads + task.tasks
    return sorted(found.values(), key=lambda one: -(one[0].total_ms or 0.0))


def _joined(how: Callable[[Sequence[float]], float], *times: float | None) -> float | None:
    """Return the sum or the longest of two times, None if one was not measured."""
    known = [one for one in times if one is not None]
    return how(known) if len(known) == len(times) else None


def own_thread(
    tid: int,
    label: str,
    times: tuple[TaskRun, TaskRun] | None,
    here: Totals | None = None,
) -> OwnThread:
    """Return the object of a placed thread: its times on this pCPU, and on any."""
    before, after = times or (None, None)
    return OwnThread(
        tid=tid,
        label=label,
        here_ms=_ms(here.ran_ns) if here else None,
        slices=here.slices if here else None,
        ran_ms=_ms(after.ran_ns - before.ran_ns) if before and after else None,
        waited_ms=_ms(after.waited_ns - before.waited_ns) if before and after else None,
        timeline=_timeline(here),
    )


def _task(
    ran: Totals,
    task: SeenTask | None,
    kind: TaskClass,
    known: Known,
    node: NodeConditions,
    *,
    cpu: int,
    timed: bool,
) -> RanTask:
    sandbox = known.sandbox_of(task) if task else ""
    remedy = remedies.of_task(
        task,
        kind,
        node,
        sandbox,
        is_theirs=known.may_use(sandbox, cpu),
        is_vms=bool(task and known.vm_of(task)),
    )
    seen = task or SeenTask(ran.tid, 0, "more tasks" if ran.tid == CROWD else "")
    place = place_of(seen.cgroup)
    return RanTask(
        task_class=kind,
        tid=ran.tid,
        pid=seen.pid,
        comm=seen.comm,
        parent=seen.parent,
        sandbox=sandbox,
        pod=known.pods.get(sandbox, place.pod_uid),
        unit=place.unit,
        cgroup=seen.cgroup,
        affinity=str(seen.affinity or ""),
        slices=ran.slices,
        total_ms=_ms(ran.ran_ns),
        longest_ms=_ms(ran.longest_ns) if timed else None,
        timeline=_timeline(ran),
        remedy=remedy.text,
        command=remedy.command,
    )


def _listed(
    tasks: Iterable[Totals], classes: Mapping[int, TaskClass], row: Callable[[Totals], RanTask]
) -> Iterator[RanTask]:
    """Yield a row for each task, of many of a class the first ones and one for the others.

    So no class hides another, and shares and pictures are true however many short-lived tasks
    somebody starts.
    """
    for _, same in groupby(tasks, key=lambda one: classes[one.tid]):
        group = list(same)
        yield from map(row, group[:MOST_TASKS])
        if group[MOST_TASKS:]:
            yield _crowd(group[MOST_TASKS:], row)


def _crowd(tasks: Sequence[Totals], row: Callable[[Totals], RanTask]) -> RanTask:
    """Return one row for tasks of a class: their sums, and the remedy of the first one."""
    parts = Counter[int]()
    for one in tasks:
        parts.update(dict(one.parts))
    total = tasks[0]._replace(
        slices=sum(one.slices for one in tasks),
        ran_ns=sum(one.ran_ns for one in tasks),
        longest_ns=max(one.longest_ns for one in tasks),
        parts=tuple(parts.items()),
    )
    return replace(
        row(total),
        tid=CROWD,
        pid=0,
        comm=count(len(tasks), "more task"),
        parent="",
        sandbox="",
        pod="",
        unit="",
        cgroup="",
        affinity="",
        tasks=len(tasks),
    )


def _interrupts(
    measured: Measured, cpu: int, node: NodeConditions
) -> tuple[RanInterrupt, ...] | None:
    if measured.interrupts is None:
        return None
    here = [one for one in measured.interrupts if one.cpu == cpu]
    here.sort(key=lambda one: -one.total_ns)
    return tuple(_interrupt(one, node) for one in here)


def _interrupt(found: MeasuredInterrupt, node: NodeConditions) -> RanInterrupt:
    remedy = remedies.of_interrupt(found, node)
    return RanInterrupt(
        interrupt=found.kind,
        name=found.name,
        irq=found.irq,
        times=found.times,
        total_ms=_ms(found.total_ns),
        longest_ms=_ms(found.longest_ns),
        remedy=remedy.text,
        command=remedy.command,
    )


def _histogram(tasks: Iterable[Totals]) -> Iterator[HistogramBar]:
    counts = [0] * BUCKETS
    for one in tasks:
        for bucket, slices in enumerate(one.buckets):
            counts[bucket] += slices
    used = [bucket for bucket, slices in enumerate(counts) if slices]
    for bucket in range(used[0], used[-1] + 1) if used else ():
        yield HistogramBar(bucket_end_us(bucket), counts[bucket])


def _timeline(ran: Totals | None) -> tuple[TimelinePart, ...]:
    parts: Mapping[int, int] = dict(ran.parts) if ran else {}
    return tuple(TimelinePart(part, _ms(ns)) for part, ns in sorted(parts.items()) if ns)


def _ms(ns: int) -> float:
    return ns / 1e6
