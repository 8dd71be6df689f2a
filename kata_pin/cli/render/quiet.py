"""`show --cpus`: what disturbs exclusive pCPUs, as lines of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.text import Text

from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import NAMES, Column, Output, paragraph, styled, table
from kata_pin.cli.reports.words import IDLE_LIMITS, NOTHING
from kata_pin.model.reports.doctor import Row
from kata_pin.model.reports.quiet import Quiet, QuietCpu, QuietInterrupt

_STYLES: Final = {"warn": phrases.ODD, "fail": phrases.BAD}

NAMED: Final = 6
"""Interrupts per pCPU that are named."""


def quiet(found: Quiet, output: Output) -> list[Text]:
    """Return one row per exclusive pCPU, its interrupts, and what concerns the whole node."""
    if not found.cpus:
        return []
    title = (
        f"Work of the kernel on exclusive pCPUs, per second (counted for {found.measured_s:g} s)"
    )
    lines = [Text(), *paragraph(Text(title, style="bold underline"), output)]
    columns = [
        Column("pCPU", right=True),
        Column("MOVABLE", right=True),
        Column("MANAGED", right=True),
        Column("TICK", right=True),
        Column("IPI", right=True),
        Column("SOFTIRQ", right=True),
        Column("KTHREADS", right=True, optional=1),
        Column("IDLE-LIMIT", optional=2),
        Column("GOVERNOR", NAMES, optional=3),
        Column("SIBLING", NAMES, fold=14),
    ]
    lines += table(columns, [_row(one) for one in found.cpus], output)
    for one in found.cpus:
        if one.interrupts:
            named = styled(f"pCPU {one.cpu}: {'; '.join(_named(one.interrupts))}")
            lines += paragraph(named, output, indent=2)
    for problem in found.problems:
        lines += paragraph(styled(f"! not readable: {problem}", phrases.ODD), output, indent=2)
    return [*lines, Text(), *_rows(found.rows, output)]


def _row(one: QuietCpu) -> list[Text]:
    by_kind = {kind: _sum(one.interrupts, kind) for kind in ("movable", "managed")}
    softirqs = None if one.softirqs is None else sum(one.softirqs.values())
    idle = one.idle_limit
    siblings = [f"{each.cpu} ({each.owner or 'not exclusive'})" for each in one.siblings]
    return [
        Text(str(one.cpu)),
        styled(_rate(by_kind["movable"]), phrases.ODD if by_kind["movable"] else ""),
        Text(_rate(by_kind["managed"])),
        Text(_rate(one.tick_per_s)),
        Text(_rate(one.ipi_per_s)),
        Text(_rate(softirqs)),
        Text("n/a" if one.kernel_threads is None else str(one.kernel_threads)),
        Text("n/a" if idle is None else IDLE_LIMITS.get(idle, f"{idle} us")),
        styled(one.governor or NOTHING),
        styled(", ".join(siblings) or NOTHING),
    ]


def _sum(found: Sequence[QuietInterrupt] | None, kind: str) -> float | None:
    if found is None:
        return None
    return sum(one.per_s for one in found if one.kind == kind)


def _rate(per_s: float | None) -> str:
    return (
        "n/a" if per_s is None else f"{per_s:.0f}" if per_s >= 10 or not per_s else f"{per_s:.1f}"
    )


def _named(found: Sequence[QuietInterrupt]) -> Iterator[str]:
    active = [one for one in found if one.per_s]
    for one in active[:NAMED]:
        yield f"{one.name} (interrupt {one.number}, {one.kind}) {_rate(one.per_s)}/s"
    if len(active) > NAMED:
        yield f"{len(active) - NAMED} more"
    for kind in ("movable", "managed", "guest"):
        if silent := sum(1 for one in found if one.kind == kind and not one.per_s):
            yield f"{silent} {kind} silent"


def _rows(rows: Sequence[Row], output: Output) -> list[Text]:
    columns = [Column("SUBJECT", NAMES, fold=16), Column("STATUS"), Column("FOUND", fold=24)]
    cells = []
    for row in rows:
        subject = f"{row.sandbox} {row.check}" if row.sandbox else row.check
        text = f"{row.text}. Remedy: {row.remedy}" if row.remedy else row.text
        cells.append(
            [styled(subject), styled(row.status, _STYLES.get(row.status, "")), styled(text)]
        )
    return table(columns, cells, output)
