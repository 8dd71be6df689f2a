"""`prove` as lines of text: one row per pCPU, then who ran there, then the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from kata_pin.base.documents.measured import (
    GuestLatency,
    HistogramBar,
    OwnThread,
    ProveDocument,
    ProvedPcpu,
    RanInterrupt,
    RanTask,
    VcpuLatency,
)
from kata_pin.base.values import count
from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import NAMES, Column, Output, Text, paragraph, styled, table
from kata_pin.cli.reports.words import NOTHING
from kata_pin.placement.proof_rows import by_process

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
        headline = (
            f"{document.hostname}, Linux {document.kernel}: measured for {document.asked_s:g} s "
        )
        headline += f"by {METHODS.get(document.method, document.method)}"
        lines += paragraph(styled(headline, phrases.DIM), output)
    for one in document.refused:
        lines += paragraph(styled(f"not by {one.method}: {one.reason}", phrases.ODD), output)
    if document.pcpus:
        lines += [Text(), *_pcpus(document.pcpus, output)]
    for pcpu in document.pcpus:
        lines += _pcpu(pcpu, output)
    for guest in document.guests:
        lines += _guest(guest, document.asked_s, output)
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
    order = list(dict.fromkeys(one.task_class for one in pcpu.tasks))
    programs = sorted(by_process(pcpu.tasks), key=lambda one: order.index(one[0].task_class))
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


FELT: Final = (
    *("GUEST-CPU", "VCPU", "pCPUS", "RAN", "STEAL", "PREEMPTED", "LONGEST-WAIT", "HALTS"),
    *("EXITS", "OUTSIDE", "LONGEST-EXIT"),
)
"""The columns of `felt`."""


def felt(vcpu: VcpuLatency, seconds: float) -> list[str]:
    """Return what the guest feels on one of its CPUs, a text per column."""
    longest = vcpu.reasons[0] if vcpu.reasons else None
    counts = (vcpu.preempted, vcpu.halts, vcpu.exits)
    preempted, halts, exits = ("n/a" if one is None else str(one) for one in counts)
    last = milliseconds(longest.longest_ms) if longest else NOTHING
    return [
        "n/a" if vcpu.guest_cpu is None else str(vcpu.guest_cpu),
        vcpu.vcpu.removeprefix("vcpu "),
        vcpu.cpus,
        *(_share(one, seconds) for one in (vcpu.ran_ms, vcpu.steal_ms)),
        *(preempted, milliseconds(vcpu.longest_wait_ms), halts, exits),
        *(_share(vcpu.outside_ms, seconds), last),
    ]


def causes(vcpu: VcpuLatency) -> str:
    """Return what else ran on a vCPU's pCPU; empty if nothing did."""
    return ", ".join(f"{one.who} {milliseconds(one.ran_ms)}" for one in vcpu.causes)


def exits(vcpu: VcpuLatency) -> str:
    """Return why a vCPU was outside its guest for long; empty if it never was."""
    return ", ".join(
        f"{one.reason} up to {milliseconds(one.longest_ms)} ({one.long} of {one.times} exits)"
        for one in vcpu.reasons
        if one.long
    )


def polling(guest: GuestLatency, seconds: float) -> str:
    """Return how KVM waited for vCPUs that halted; empty if that is not known."""
    found = guest.halt_polling
    if found is None:
        return ""
    polled, wasted = (_share(one, seconds) for one in (found.polled_ms, found.wasted_ms))
    return (
        f"halt polling: its vCPUs halted {count(found.halts, 'time')}; KVM polled with success for "
        f"{polled} of the time, in vain for {wasted}"
    )


def _guest(guest: GuestLatency, seconds: float, output: Output) -> Iterator[Text]:
    """Yield what one guest felt, what the host did meanwhile, and how to measure inside."""
    yield from (Text(), *paragraph(styled(f"guest of {guest.pod}", phrases.NAME), output))
    columns = [
        Column(FELT[0], breaks="", right=True),
        Column(FELT[1], right=True),
        Column(FELT[2], fold=8),
        Column(FELT[3], breaks="", right=True, optional=4),
        Column(FELT[4], breaks="", right=True),
        Column(FELT[5], breaks="", right=True, optional=1),
        Column(FELT[6], breaks="", right=True),
        Column(FELT[7], breaks="", right=True, optional=3),
        Column(FELT[8], breaks="", right=True),
        Column(FELT[9], breaks="", right=True, optional=2),
        Column(FELT[10], breaks="", right=True),
    ]
    rows = [[Text(one) for one in felt(vcpu, seconds)] for vcpu in guest.vcpus]
    yield from table(columns, rows, output)
    for vcpu in guest.vcpus:
        if text := exits(vcpu):
            text = f"{vcpu.vcpu} left its guest for 0.1 ms or more: {text}"
            yield from paragraph(styled(text), output, indent=2)
        if vcpu.causes:
            text = f"also on pCPU {vcpu.cpus} of {vcpu.vcpu}: {causes(vcpu)}"
            yield from paragraph(styled(text), output, indent=2)
    if text := polling(guest, seconds):
        yield from paragraph(styled(text), output, indent=2)
    for problem in guest.problems:
        yield from paragraph(styled(problem, phrases.ODD), output, indent=2)
    if guest.commands:
        yield from paragraph(Text(INSIDE), output, indent=2)
    for command in guest.commands:
        yield from paragraph(Text("    ") + styled(command.command), output, indent=6)


INSIDE: Final = "to measure inside the guest, if the container's image has rt-tests, run:"


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
    """Yield what to do about foreign tasks and devices' interrupts."""
    rows = [
        (task.comm or "gone tasks", task.remedy, task.command)
        for task in tasks
        if task.task_class != "per-cpu-kernel"
    ]
    rows += [(f"interrupt {one.irq}", one.remedy, one.command) for one in interrupts if one.command]
    return phrases.remedies(rows, output)


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
