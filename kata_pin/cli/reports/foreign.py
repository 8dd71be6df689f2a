"""What `check` measures: who ran on exclusive pCPUs of others while it looked.

`prove` has the whole answer; here user processes and other sandboxes count, which fail, and of the
kernel's threads only a note is left. What the daemon's watch saw counts too while who it was may
still run there, and alone where this user may not measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kata_pin.cli.reports import owners, prove
from kata_pin.cli.reports.words import age
from kata_pin.errors import HostError
from kata_pin.host.measure.seen import look_at
from kata_pin.host.root import HOST
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.windows import Method, TaskClass
from kata_pin.model.reports.check import Finding, Foreign, Measurement
from kata_pin.model.reports.prove import ProveDocument, ProvedPcpu, RanTask
from kata_pin.model.reports.state import State
from kata_pin.model.reports.watch import WatchDocument, WatchedPcpu
from kata_pin.policy.isolation.classes import Owner
from kata_pin.policy.isolation.tables import by_process

_METHODS: Final = (Method.PERF, Method.HIST)
"""Counters alone tell less than the daemon's watch has seen."""

NAMED: Final = 3
"""Most processes of one pCPU that a finding names."""

MayRun = Callable[[RanTask, int], bool]

_FAILS: Final = {TaskClass.USER.value, TaskClass.OTHER_SANDBOX.value}
_UNSEEN: Final = {TaskClass.UNKNOWN.value}
_NOTED: Final = {TaskClass.UNBOUND_KERNEL.value}


@dataclass(frozen=True)
class Looked:
    """What was measured. `unknown` is what could not be, and why; `ran_ms` are times by pid."""

    findings: tuple[Finding, ...] = ()
    unknown: tuple[str, ...] = ()
    ran_ms: Mapping[int, float] = field(default_factory=dict)
    measured: Measurement | None = None


NOTHING: Final = Looked()
"""What was measured where nothing was."""


def look(
    state: State,
    again: Callable[[], State],
    wanted: prove.Wanted,
) -> Looked:
    """Measure the exclusive pCPUs; `again` returns the state document afterwards."""
    if wanted.seconds <= 0 or not owners.owners(state, wanted.about):
        return NOTHING
    wanted, states = replace(wanted, methods=_METHODS), iter([state])
    try:
        return judged(prove.prove(lambda: next(states, None) or again(), wanted))
    except HostError as error:
        return Looked(unknown=(f"exclusive pCPUs were not measured: {error}",))


def with_watch(
    looked: Looked, watch: WatchDocument, owned: Iterable[Owner], may_run: MayRun
) -> Looked:
    """Return what was measured together with what the daemon saw of the same pCPUs.

    `may_run` says whether a task may still run on a pCPU.
    """
    pairs = {(one.cpu, one.sandbox) for one in owned}
    seen = [one for one in watch.pcpus if (one.cpu, one.sandbox) in pairs]
    named = {one.cpus for one in looked.findings if one.fails}
    findings = [
        finding
        for one in seen
        if one.episode_s is not None and str(one.cpu) not in named
        for finding in _episode(one, watch.max_foreign_percent, looked, may_run)
    ]
    unknown, measured = looked.unknown, looked.measured
    counted = {(one.cpu, one.sandbox) for one in seen if one.over_s is not None}
    if measured is None and pairs and counted >= pairs:
        cpus = CpuSet(cpu for cpu, _ in pairs)
        over_s = min(one.over_s or 0.0 for one in seen)
        measured = Measurement(str(cpus), over_s, "watch", watch.max_foreign_percent)
        unknown = tuple(_unseen(seen, watch.max_foreign_percent))
    return replace(
        looked, findings=(*looked.findings, *findings), unknown=unknown, measured=measured
    )


def _unseen(seen: Iterable[WatchedPcpu], most_percent: float) -> Iterator[str]:
    """Yield the pCPUs of which the daemon cannot tell whether others had them for too long."""
    for one in seen:
        others = one.others_percent or 0.0
        if one.episode_s is None and one.window is None and others > most_percent:
            yield (
                f"others ran on pCPU {one.cpu} of {one.pod} for at most {others:.3g} % of "
                f"{one.over_s or 0.0:.1f} s; the daemon has not recorded who"
            )


def may_still_run(task: RanTask, cpu: int) -> bool:
    """Whether a task that ran on a pCPU lives and may run there now."""
    now = look_at(HOST, task.tid, task.pid)
    return now is not None and now.comm == task.comm and cpu in (now.affinity or ())


def _episode(
    one: WatchedPcpu, most_percent: float, looked: Looked, may_run: MayRun
) -> Iterator[Finding]:
    """Yield what is to be said of foreign tasks that the daemon saw on a pCPU and that go on."""
    since = f"; the daemon has seen this for {age(one.episode_s)}"
    row = one.window
    if row is None:
        text = (
            f"others ran on pCPU {one.cpu} of {one.pod} for {one.others_percent or 0.0:.3g} % of "
            f"{one.over_s or 0.0:.1f} s; who it was is not recorded{since}"
        )
        seen = Foreign(one.cpu, one.others_percent or 0.0, (), one.age_s)
        fails = looked.measured is None
        yield Finding("foreign", fails, one.sandbox, str(one.cpu), text, foreign=seen)
        return
    left = tuple(task for task in row.tasks if may_run(task, one.cpu))
    for finding in _findings(replace(row, tasks=left), most_percent):
        if finding.fails and finding.foreign is not None and left:
            seen = replace(finding.foreign, seen_s=one.window_age_s)
            yield replace(finding, text=finding.text + since, foreign=seen)


def judged(found: ProveDocument) -> Looked:
    """Return what a measurement means for `check`. Pure."""
    cpus = CpuSet(row.cpu for row in found.pcpus)
    ran: dict[int, float] = {}
    for task in (task for row in found.pcpus for task in row.tasks):
        ran[task.pid] = ran.get(task.pid, 0.0) + (task.total_ms or 0.0)
    return Looked(
        tuple(one for row in found.pcpus for one in _findings(row, found.max_foreign_percent)),
        tuple(one for row in found.pcpus for one in _unknown(row, found.max_foreign_percent)),
        ran,
        Measurement(str(cpus), found.asked_s, found.method, found.max_foreign_percent),
    )


def _findings(row: ProvedPcpu, most_percent: float) -> Iterator[Finding]:
    for classes, fails in ((_FAILS, True), (_NOTED, False)):
        tasks = [one for one in row.tasks if one.task_class in classes]
        percent = _percent(tasks, row)
        if percent > most_percent:
            yield _finding(row, percent, tasks, fails=fails)
    if not row.tasks and row.verdict == "violated":  # the method names no tasks
        yield _finding(row, row.foreign_percent or 0.0, [], fails=True)


def _unknown(row: ProvedPcpu, most_percent: float) -> Iterator[str]:
    if row.verdict == "unproved":
        yield f"pCPU {row.cpu} of {row.pod}: the measurement is not whole: {row.reason}"
    unseen = _percent([one for one in row.tasks if one.task_class in _UNSEEN], row)
    if unseen > most_percent:
        yield (
            f"tasks that ended before they could be identified ran on pCPU {row.cpu} of {row.pod} "
            f"for {unseen:.3g} % of the time"
        )


def _percent(tasks: Iterable[RanTask], row: ProvedPcpu) -> float:
    """Return the share of the window that some tasks had."""
    return sum(one.total_ms or 0.0 for one in tasks) / (10 * row.window_s) if row.window_s else 0.0


def _finding(row: ProvedPcpu, percent: float, tasks: list[RanTask], *, fails: bool) -> Finding:
    tasks.sort(key=lambda one: -(one.total_ms or 0.0))
    programs = by_process(tasks)
    named = [_named(one) for one, _ in programs[:NAMED]]
    if len(programs) > NAMED:
        named.append(f"{len(programs) - NAMED} more")
    text = f"others ran on pCPU {row.cpu} of {row.pod} for {percent:.3g} % of {row.window_s:.1f} s"
    text += f": {', '.join(named)}" if named else f" ({row.reason})"
    if programs:
        most = programs[0][0]
        text += f"; {most.remedy}"
        text += f"; run: {most.command}" if most.command else ""
    return Finding(
        "foreign",
        fails,
        row.sandbox,
        str(row.cpu),
        text,
        foreign=Foreign(row.cpu, round(percent, 4), tuple(tasks)),
    )


def _named(task: RanTask) -> str:
    owner = task.pod or task.unit
    whose = f" of {owner}" if owner else ""
    who = f" (pid {task.pid}{whose})" if task.pid else ""
    time = "" if task.total_ms is None else f" {task.total_ms:.1f} ms"
    return f"{task.comm}{who}{time}"
