"""`who` as lines of text: the pCPUs, the processes allowed on them, kernel threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, facts, paragraph, styled, table
from kata_pin.cli.reports.words import NOTHING, age
from kata_pin.model.count_noun import count
from kata_pin.model.reports.who import HostProcess, KernelThreads, WhoDocument, WhoPcpu

_NAMES_SHOWN: Final = 6


def who(document: WhoDocument, output: Output) -> list[Text]:
    """Return the pCPUs, and every host thread that may run on them."""
    only = document.pcpus[0] if len(document.pcpus) == 1 else None
    lines = facts(_place(only, output), output) if only else _places(document.pcpus, output)
    if not document.daemon.running:
        lines += paragraph(phrases.daemon(document.daemon), output)
    if not any(one.online for one in document.pcpus):
        return [*lines, styled("offline: no thread can run here", phrases.ODD)]
    lines.append(Text())
    columns = [
        Column("PID", right=True),
        Column("NAME", NAMES, fold=12, comfort=16),
        Column("USER", NAMES, fold=8),
        Column("OWNER", NAMES, fold=12, comfort=20),
        Column("AFFINITY", CPUS),
        Column("THREADS", ", ", fold=16, comfort=20),
        Column("AGE", breaks="", right=True, optional=1),
        Column("CPU-TIME", breaks="", right=True),
        Column("COMMAND", " /", fold=16, comfort=24, optional=1),
    ]
    rows = [_process(process, output) for process in document.processes]
    lines += table(columns, rows, output) if rows else [Text("no user processes")]
    here = "this pCPU" if only else "these pCPUs"
    lines += [Text(), *_kernel(document.kernel, here, output)]
    intruders = sum(1 for process in document.processes if process.intruder)
    if intruders:
        where = "this exclusive pCPU" if only else "exclusive pCPUs"
        told = f"! {count(intruders, 'intruder')} on {where}"
        lines += [Text(), *paragraph(styled(told, phrases.BAD), output, indent=2)]
    return lines


def _place(pcpu: WhoPcpu, output: Output) -> list[tuple[str, Text]]:
    place = pcpu.place
    where = ""
    if place is not None:
        where = output.dot.join(
            [
                f"NUMA node {place.node}",
                f"package {place.package}",
                f"core {place.core}",
                f"siblings {place.siblings}",
                *place.marks,
            ]
        )
    busy = f"{_busy(pcpu)} of the last 0.2 s" if pcpu.busy_percent is not None else ""
    return [
        ("pCPU", styled(str(pcpu.cpu), phrases.NAME)),
        ("place", styled(where)),
        ("claim", styled(_claim(pcpu))),
        ("busy", Text(busy)),
    ]


def _places(pcpus: Sequence[WhoPcpu], output: Output) -> list[Text]:
    """Return one row per pCPU."""
    columns = [
        Column("pCPU", right=True),
        Column("NUMA", right=True),
        Column("SIBLINGS", CPUS),
        Column("BUSY", breaks="", right=True),
        Column("CLAIM", NAMES, fold=20),
        Column("MARKS", fold=12, optional=1),
    ]
    return table(columns, [_placed(one) for one in pcpus], output)


def _placed(pcpu: WhoPcpu) -> list[Text]:
    place = pcpu.place
    return [
        styled(str(pcpu.cpu), phrases.NAME),
        Text(NOTHING if place is None else str(place.node)),
        phrases.cpus(None if place is None else place.siblings),
        Text(_busy(pcpu)),
        styled(_claim(pcpu) if pcpu.online else "offline", "" if pcpu.online else phrases.ODD),
        styled(", ".join(place.marks) if place else ""),
    ]


def _claim(pcpu: WhoPcpu) -> str:
    claims = (
        f"{claim.claim} {'to' if claim.claim == 'exclusive' else 'by'} {claim.pod}"
        + (f" ({claim.container})" if claim.container else "")
        for claim in pcpu.claims
    )
    return "; ".join(claims) or "none"


def _busy(pcpu: WhoPcpu) -> str:
    return NOTHING if pcpu.busy_percent is None else f"{pcpu.busy_percent:.0f} %"


def _process(process: HostProcess, output: Output) -> list[Text]:
    counts: dict[str, int] = {}
    for thread in process.threads:
        name = thread.label or thread.comm
        counts[name] = counts.get(name, 0) + 1
    threads = ", ".join(n if c == 1 else f"{n} {output.times}{c}" for n, c in counts.items())
    affinities = dict.fromkeys(thread.affinity for thread in process.threads)
    owner = process.pod or "the host"
    style = phrases.BAD if process.intruder else ""
    return [
        Text(str(process.pid)),
        styled(process.comm, style),
        styled(process.user or NOTHING),
        styled(f"{owner}, intruder" if process.intruder else owner, style),
        styled("; ".join(affinities)),
        styled(threads),
        Text(age(process.age_s)),
        Text(NOTHING if process.cpu_s is None else f"{process.cpu_s:.1f} s"),
        styled(process.command or NOTHING, phrases.DIM),
    ]


def _kernel(kernel: KernelThreads, here: str, output: Output) -> list[Text]:
    lines: list[Text] = []
    for threads, words in (
        (kernel.bound, f"bound to {here}"),
        (kernel.roaming, "that may also run here"),
    ):
        names = list(dict.fromkeys(thread.comm for thread in threads))
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            listed = ", ".join(names[:_NAMES_SHOWN])
            text = f"{count(len(threads), 'kernel thread')} {words}: {listed}{more}"
            lines += paragraph(styled(text, phrases.DIM), output, indent=2)
    return lines
