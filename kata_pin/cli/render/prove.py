"""`prove` as lines of text: one row per pCPU, then who ran there, then the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.text import Text

from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import NAMES, Column, Output, paragraph, styled, table
from kata_pin.cli.reports.words import NOTHING
from kata_pin.model.count_noun import count
from kata_pin.model.reports.prove import (
    HistogramBar,
    OwnThread,
    ProveDocument,
    ProvedPcpu,
    RanInterrupt,
    RanTask,
)
from kata_pin.policy.isolation.tables import by_process

STYLES: Final = {"proved": phrases.GOOD, "violated": phrases.BAD, "unproved": phrases.ODD}

CLASSES: Final = {
    "same-pod": "same pod",
    "other-sandbox": "other sandbox",
    "user": "user task",
    "unbound-kernel": "unbound kernel thread",
    "per-cpu-kernel": "per-CPU kernel thread",
    "unknown": "unknown",
}
"""The classes of tasks in words."""

METHODS: Final = {
    "perf": "records of every task switch (perf)",
    "hist": "the kernel's histograms of task switches (tracefs)",
    "schedstat": "counts of task switches (/proc/schedstat)",
    "wait": "the time that its threads waited (schedstat)",
}

BAR: Final = 20

SHOWN: Final = 12
"""Processes that are listed of each pCPU, and commands of each remedy: what an operator acts on."""


def prove(document: ProveDocument, output: Output) -> list[Text]:
    """Return the measurement and its verdict."""
    lines: list[Text] = []
    if not document.daemon.running:
        lines += paragraph(phrases.daemon(document.daemon), output)
    if document.pcpus:
        told = f"{document.hostname}, Linux {document.kernel}: {document.asked_s:g} s, "
        told += f"by {METHODS.get(document.method, document.method)}"
        lines += paragraph(styled(told, phrases.DIM), output)
    for one in document.refused:
        lines += paragraph(styled(f"not by {one.method}: {one.reason}", phrases.ODD), output)
    if document.pcpus:
        lines += [Text(), *_pcpus(document.pcpus, output)]
    for pcpu in document.pcpus:
        lines += _pcpu(pcpu, output)
    style = STYLES.get(document.verdict, "")
    verdict = f"{document.verdict.upper()}: {document.reason}"
    return [*lines, Text(), *paragraph(styled(verdict, style), output)]


def _pcpus(pcpus: Iterable[ProvedPcpu], output: Output) -> list[Text]:
    columns = [
        Column("pCPU", right=True),
        Column("OWNER", NAMES, fold=20),
        Column("VERDICT"),
        Column("OWN", breaks="", right=True),
        Column("WAITED", breaks="", right=True),
        Column("SAME-POD", breaks="", right=True, optional=2),
        Column("FOREIGN", breaks="", right=True),
        Column("UNAVOIDABLE", breaks="", right=True, optional=1),
        Column("IDLE", breaks="", right=True, optional=3),
    ]
    return table(columns, [_row(one) for one in pcpus], output)


def _row(pcpu: ProvedPcpu) -> list[Text]:
    owner = f"{pcpu.pod} ({pcpu.container})" if pcpu.container else pcpu.pod
    style = STYLES.get(pcpu.verdict, "")
    times = (waited_ms(pcpu), pcpu.pod_ms, pcpu.foreign_ms, pcpu.unavoidable_ms, pcpu.idle_ms)
    return [
        styled(str(pcpu.cpu), phrases.NAME),
        styled(owner),
        styled(pcpu.verdict, style),
        *(Text(_share(one, pcpu.window_s)) for one in (pcpu.own_ms, *times)),
    ]


def waited_ms(pcpu: ProvedPcpu) -> float | None:
    """Return how long the owner's threads waited, None where that is not known of any."""
    waits = [one.waited_ms for one in pcpu.own if one.waited_ms is not None]
    return sum(waits) if waits else None


def _pcpu(pcpu: ProvedPcpu, output: Output) -> Iterator[Text]:
    """Yield what ran on one pCPU, nothing if that was proved to be its owner's threads alone."""
    if pcpu.verdict == "proved" and not pcpu.tasks and not pcpu.interrupts:
        return
    head = styled(f"pCPU {pcpu.cpu} ", phrases.NAME)
    head += styled(f"{pcpu.verdict}: ", STYLES.get(pcpu.verdict, "")) + styled(pcpu.reason)
    yield from (Text(), *paragraph(head, output, indent=2))
    for own in pcpu.own:
        yield from paragraph(styled(_own(own, pcpu.window_s)), output, indent=2)
    programs = _worst_first(pcpu.tasks)
    if programs:
        columns = [
            Column("CLASS", fold=12),
            Column("NAME", NAMES, fold=12),
            Column("PID", breaks="", right=True),
            Column("THREADS", right=True, optional=1),
            Column("WHERE", NAMES, fold=20, comfort=24),
            Column("SLICES", breaks="", right=True),
            Column("TOTAL", breaks="", right=True),
            Column("LONGEST", breaks="", right=True),
        ]
        yield from table(columns, [_task(*one) for one in programs[:SHOWN]], output)
    if more := sum(threads for _, threads in programs[SHOWN:]):
        yield Text(f"{count(more, 'more task')} with less time; --json lists them")
    if pcpu.interrupts:
        columns = [
            Column("INTERRUPT", fold=12),
            Column("NAME", NAMES, fold=12),
            Column("TIMES", breaks="", right=True),
            Column("TOTAL", breaks="", right=True),
            Column("LONGEST", breaks="", right=True),
        ]
        yield from table(columns, [_interrupt(one) for one in pcpu.interrupts], output)
    yield from _histogram(pcpu.histogram, output)
    yield from _remedies([one for one, _ in programs[:SHOWN]], pcpu.interrupts, output)


def _worst_first(tasks: Sequence[RanTask]) -> list[tuple[RanTask, int]]:
    """Return tasks by process, in the order of their classes."""
    order = list(dict.fromkeys(one.task_class for one in tasks))
    return sorted(by_process(tasks), key=lambda one: order.index(one[0].task_class))


def _own(thread: OwnThread, window_s: float) -> str:
    ran = "n/a" if thread.ran_ms is None else _share(thread.ran_ms, window_s)
    waited = "n/a" if thread.waited_ms is None else _share(thread.waited_ms, window_s)
    return f"{thread.label} (tid {thread.tid}): ran {ran}, waited {waited} of the time"


def _task(task: RanTask, threads: int) -> list[Text]:
    bad = task.task_class not in {"same-pod", "per-cpu-kernel"}
    name = task.comm or (f"gone, made by {task.parent}" if task.parent else "gone")
    where = task.pod or task.unit or task.cgroup
    return [
        styled(CLASSES.get(task.task_class, task.task_class), phrases.BAD if bad else phrases.DIM),
        styled(name),
        Text(str(task.pid) if task.pid else NOTHING),
        Text(str(threads)),
        styled(where or NOTHING),
        Text(str(task.slices)),
        Text(milliseconds(task.total_ms)),
        Text(milliseconds(task.longest_ms)),
    ]


def _interrupt(found: RanInterrupt) -> list[Text]:
    name = found.name if found.irq < 0 else f"{found.name} ({found.irq})"
    return [
        styled(found.interrupt),
        styled(name),
        Text(str(found.times)),
        Text(milliseconds(found.total_ms)),
        Text(milliseconds(found.longest_ms)),
    ]


def _histogram(bars: Iterable[HistogramBar], output: Output) -> list[Text]:
    """Return how long the foreign slices were."""
    bars = [one for one in bars if one.slices]
    if not bars:
        return []
    most = max(one.slices for one in bars)
    block = "█" if output.unicode else "#"
    rows = [
        [
            Text(f"<= {microseconds(one.up_to_us)}"),
            Text(str(one.slices)),
            Text(block * -(-BAR * one.slices // most)),
        ]
        for one in bars
    ]
    columns = [
        Column("FOREIGN SLICES", breaks="", right=True),
        Column("COUNT", breaks="", right=True),
        Column("", breaks=""),
    ]
    return table(columns, rows, output)


def _remedies(
    tasks: Iterable[RanTask], interrupts: Iterable[RanInterrupt], output: Output
) -> Iterator[Text]:
    """Yield what to do about foreign tasks and devices' interrupts: each text once, with names.

    Commands begin on lines of their own, as they are typed.
    """
    named: dict[str, dict[str, str]] = {}  # remedy -> command or name -> name
    for task in tasks:
        if task.task_class != "per-cpu-kernel":
            name = task.comm or "gone tasks"
            named.setdefault(task.remedy, {}).setdefault(task.command or name, name)
    for found in interrupts:
        if found.command:
            name = f"interrupt {found.irq}"
            named.setdefault(found.remedy, {}).setdefault(found.command, name)
    for remedy, commands in named.items():
        names = ", ".join(dict.fromkeys(commands.values()))
        yield from paragraph(styled(f"{names}: {remedy}"), output, indent=2)
        for command, name in commands.items():
            if command != name:
                yield from paragraph(Text("    ") + styled(command), output, indent=6)


def _share(ms: float | None, window_s: float) -> str:
    """Return a time as a share of the window; enough digits that something is never 0."""
    if ms is None:
        return "n/a"
    percent = ms / 10 / window_s if window_s else 0.0
    if not percent:
        return "0 %"
    return f"{percent:.1f} %" if percent >= 1 else f"{max(percent, 0.001):.3f} %"


def milliseconds(ms: float | None) -> str:
    """Return a time, `n/a` where it was not measured."""
    return "n/a" if ms is None else f"{ms:.3f} ms"


def microseconds(us: float) -> str:
    """Return a limit of the histogram in its own unit."""
    for limit, divisor, unit in ((1e3, 1, "us"), (1e6, 1e3, "ms")):
        if us < limit:
            return f"{us / divisor:.0f} {unit}"
    return f"{us / 1e6:.1f} s"
