"""`prove --html`: a page with the verdict, the node, who ran when, and every task that ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kata_pin.cli.render import phrases
from kata_pin.cli.render.drawing import svg
from kata_pin.cli.render.drawing.page import OUTPUT, figure, node, page, paragraph, table
from kata_pin.cli.render.drawing.picture import picture
from kata_pin.cli.render.drawing.timeline import histogram, timelines
from kata_pin.cli.render.prove import CLASSES, METHODS, milliseconds, waited_ms
from kata_pin.model.reports.prove import ProveDocument, ProvedPcpu
from kata_pin.model.reports.state import State

STYLES = {"proved": "good", "violated": "bad", "unproved": "odd"}


def document(proof: ProveDocument, state: State) -> str:
    """Return a page about a measurement; `state` is the node that was measured."""
    shares = {
        one.cpu: one.foreign_percent / 100 for one in proof.pcpus if one.foreign_percent is not None
    }
    title = f"prove: {svg.title_of(state)}"
    return page(
        title,
        [
            paragraph(
                f"{proof.verdict}: {proof.reason}", f"verdict {STYLES.get(proof.verdict, 'odd')}"
            ),
            *map(paragraph, _facts(proof, state)),
            "<h2>Verdicts</h2>",
            table(_VERDICTS, map(_verdict, proof.pcpus), names=1),
            *_pictures(proof),
            "<h2>Other tasks that ran</h2>",
            table(_TASKS, _tasks(proof.pcpus), names=1),
            *_interrupts(proof.pcpus),
            "<h2>The node</h2>",
            *node(title, picture(state, OUTPUT, foreign=shares)),
        ],
    )


def _facts(proof: ProveDocument, state: State) -> Iterator[str]:
    method = METHODS.get(proof.method, proof.method)
    yield f"{proof.asked_s:g} s until {proof.time}, by {method}"
    yield f"accepted: {proof.max_foreign_percent:g}% foreign time on each pCPU"
    for one in proof.refused:
        yield f"not by {one.method}: {one.reason}"
    yield phrases.node(state, OUTPUT).plain


def _pictures(proof: ProveDocument) -> Iterator[str]:
    for heading, drawn in (
        ("Who ran when", timelines(proof)),
        ("Foreign slices by length", histogram(proof)),
    ):
        if drawn:
            yield f"<h2>{heading}</h2>"
            yield figure(drawn)


_VERDICTS = (
    *("pCPU", "owner", "verdict", "why", "own", "waited", "pod", "foreign"),
    *("unavoidable", "idle", "interrupts", "foreign slices", "records", "lost"),
)


def _verdict(pcpu: ProvedPcpu) -> Sequence[str]:
    owner = f"{pcpu.pod} ({pcpu.container})" if pcpu.container else pcpu.pod
    times = (pcpu.own_ms, waited_ms(pcpu), pcpu.pod_ms, pcpu.foreign_ms)
    return (
        *(str(pcpu.cpu), owner, pcpu.verdict, pcpu.reason),
        *map(milliseconds, (*times, pcpu.unavoidable_ms, pcpu.idle_ms, pcpu.interrupt_ms)),
        "n/a" if pcpu.foreign_slices is None else str(pcpu.foreign_slices),
        *(str(pcpu.records), str(pcpu.lost)),
    )


_TASKS = (
    *("pCPU", "class", "name", "pid", "tid", "where", "slices", "total", "longest"),
    *("remedy", "command"),
)


def _tasks(pcpus: Iterable[ProvedPcpu]) -> Iterator[Sequence[str]]:
    for pcpu in pcpus:
        for one in pcpu.tasks:
            yield (
                *(str(pcpu.cpu), CLASSES.get(one.task_class, one.task_class)),
                one.comm or (f"gone, made by {one.parent}" if one.parent else "gone"),
                *(str(one.pid or ""), str(one.tid) if one.tid >= 0 else "several"),
                one.pod or one.unit or one.cgroup,
                *(str(one.slices), milliseconds(one.total_ms), milliseconds(one.longest_ms)),
                *(one.remedy, one.command),
            )


def _interrupts(pcpus: Iterable[ProvedPcpu]) -> Iterator[str]:
    rows = [
        (
            *(str(pcpu.cpu), one.interrupt, one.name if one.irq < 0 else f"{one.name} ({one.irq})"),
            *(
                str(one.times),
                milliseconds(one.total_ms),
                milliseconds(one.longest_ms),
                one.remedy,
                one.command,
            ),
        )
        for pcpu in pcpus
        for one in pcpu.interrupts
    ]
    if rows:
        titles = ("pCPU", "kind", "name", "times", "total", "longest", "remedy", "command")
        yield "<h2>Interrupts</h2>"
        yield table(titles, rows, names=1)
