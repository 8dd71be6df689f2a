"""Pages in HTML: `draw --html` and `prove --html`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Final

from kata_pin.base.documents.measured import ProveDocument, ProvedPcpu, RanTask, TimelinePart
from kata_pin.base.documents.state import State
from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import NO_LIMIT, Output
from kata_pin.cli.render.prove import (
    CLASSES,
    FELT,
    INSIDE,
    METHODS,
    causes,
    exits,
    felt,
    microseconds,
    milliseconds,
    polling,
    waited_ms,
)
from kata_pin.cli.reports.findings import NOTHING, Looked
from kata_pin.cli.reports.words import safe
from kata_pin.options.pictures import svg
from kata_pin.options.pictures.picture import Picture, Tile, cut, percent, picture
from kata_pin.options.pictures.svg import RUNS
from kata_pin.placement.proof_rows import by_process

# `draw --html`: one page with the picture, what is wrong, the owners and a row per pCPU.
#
# Self-contained: no script and no link, and a policy that forbids the browser to load anything, so
# that a name from a pod could do nothing even if it were not escaped.

OUTPUT: Final = Output(NO_LIMIT)

MAX_CELL: Final = 600
"""Characters of a table's cell."""

SHORT: Final = 16
"""Characters of a text that is kept on one line."""

WORD: Final = 24
"""Characters of the longest word that is never broken."""

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def document(state: State, looked: Looked = NOTHING) -> str:
    """Return a page about a node."""
    found = picture(state, OUTPUT, looked)
    title = svg.title_of(state)
    lines = [phrases.node(state, OUTPUT).plain, phrases.daemon(state.daemon).plain]
    return page(title, [*map(paragraph, lines), *node(title, found)])


def node(title: str, found: Picture) -> list[str]:
    """Return the parts of a page about the node: findings, picture, owners and pCPUs."""
    return [
        *_wrong(found),
        figure(svg.embedded(title, found)),
        "<h2>Owners</h2>",
        table(("key", "owner", "exclusive", "shared"), _owners(found), names=1),
        "<h2>pCPUs</h2>",
        table(_COLUMNS, map(_row, found.tiles), names=1),
    ]


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole page; the parts are HTML."""
    name = escape(safe(title))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{name}</title><style>{svg.style()}{svg.page_style()}</style></head>"
        f'<body><svg width="0" height="0" aria-hidden="true">{svg.PATTERNS}</svg>'
        f"<h1>{name}</h1>\n" + "\n".join(parts) + "</body></html>\n"
    )


def paragraph(text: str, css: str = "") -> str:
    """Return a paragraph of a text."""
    return f'<p class="{css}">{_cell(text)}</p>' if css else f"<p>{_cell(text)}</p>"


def figure(picture: str) -> str:
    """Return a picture that scrolls by itself where the window is narrower."""
    return f'<div class="wide" tabindex="0">{picture}</div>'


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 0, below: int = 0
) -> str:
    """Return a table of texts; the first `names` cells of a row are its headings.

    The last `below` cells are sentences: each gets a line of its own below its row. Where the
    window is narrow, every cell has a line, which begins with its title.
    """
    across = len(titles) - below
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in titles[:across])
    body = []
    for row in rows:
        cells = [
            f'<th scope="row"{_title(title)}>{_cell(cell)}</th>'
            if n < names
            else f"<td{_title(title)}>{_cell(cell)}</td>"
            for n, (title, cell) in enumerate(zip(titles[:across], row, strict=False))
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
        body += [
            f'<tr class="below"><td{_title(title)} colspan="{across}">{_cell(cell)}</td></tr>'
            for title, cell in zip(titles[across:], row[across:], strict=True)
            if cell
        ]
    return (
        '<div class="wide"><table><thead><tr>'
        f"{head}</tr></thead><tbody>\n" + "\n".join(body) + "\n</tbody></table></div>"
    )


def _title(title: str) -> str:
    return f' data-title="{escape(title)}"'


def _cell(text: str) -> str:
    if not text:
        return ""
    shown = escape(cut(safe(text), MAX_CELL, OUTPUT))
    if len(text) <= SHORT:
        return f'<bdi class="short">{shown}</bdi>'
    long = any(len(word) > WORD for word in re.split(r"[ \-]", text))
    return f'<bdi class="long">{shown}</bdi>' if long else f"<bdi>{shown}</bdi>"


def _wrong(found: Picture) -> Iterator[str]:
    yield from (paragraph(one, "bad") for one in found.wrong)
    yield from map(paragraph, found.notes)


def _owners(found: Picture) -> Iterator[Sequence[str]]:
    for one in found.owners:
        yield one.key, one.name, str(one.exclusive), str(one.shared)


_COLUMNS: Final = (
    *("pCPU", "node", "package", "core", "use", "owner", "threads", "marks", "foreign time"),
    "problems",
)


def _row(tile: Tile) -> Sequence[str]:
    place = tile.place
    places = (place.node, place.package, place.core) if place else ("", "", "")
    return (
        str(tile.number),
        *map(str, places),
        tile.use.value,
        ", ".join(one.name for one in tile.owners),
        tile.threads,
        ", ".join(tile.marks),
        percent(tile) if tile.foreign else "",
        ", ".join(dict.fromkeys(one.kind for one in tile.problems)),
    )


# Who ran on each exclusive pCPU, when, and how long foreign slices were: two pictures in SVG.
#
# Made of the `prove` document. Times of a class are drawn as a share of each part of the window,
# from the bottom: the owner's threads, its pod's other tasks, unavoidable kernel threads, foreign
# tasks.

LABEL: Final = 14
"""Columns left of the bars."""

COLUMNS: Final = 110
"""Columns of the bars."""

HEIGHT: Final = 30
"""Pixels of a bar."""

ROWS: Final = 3
"""Rows of a pCPU: two for the bar, one for the names of the foreign tasks."""

NAMED: Final = 3
"""Foreign processes that are named below a bar."""

RUN_OF_CLASS: Final = {"same-pod": "pod", "per-cpu-kernel": "unavoidable"}
"""Every other class is foreign."""

WORDS: Final = {
    "own": "the owner's threads",
    "pod": "other tasks of its pod",
    "unavoidable": "kernel threads of this pCPU, which nothing can move",
    "foreign": "foreign tasks",
}

_PATTERNS: Final = {"pod": "shared", "unavoidable": "housekeeping", "foreign": "reserved"}
_OUTPUT: Final = Output(COLUMNS)


def timelines(proof: ProveDocument) -> str:
    """Return a bar per pCPU; empty if the document has no timelines."""
    if not proof.parts:
        return ""
    parts: list[str] = []
    for n, pcpu in enumerate(proof.pcpus):
        y = n * ROWS * svg.ROW
        parts.append(f'<g class="bar" data-cpu="{pcpu.cpu}" transform="translate(0 {y})">')
        parts += [*_bar(pcpu, proof.parts), "</g>"]
    bottom = len(proof.pcpus) * ROWS
    end = max((one.window_s for one in proof.pcpus), default=proof.asked_s)
    last = f"{end:g} s"
    parts.append(svg.text(LABEL, bottom, "0 s", "faint"))
    parts.append(svg.text(LABEL + COLUMNS - len(last), bottom, last, "faint"))
    for n, (run, words) in enumerate(WORDS.items()):
        y = (bottom + 2 + n) * svg.ROW
        swatch = _run(run, f"M0 2h{4 * svg.COLUMN:.1f}v14h-{4 * svg.COLUMN:.1f}z")
        parts.append(f'<g transform="translate(0 {y})">{swatch}{svg.text(5, 0, words)}</g>')
    title = "who ran on each exclusive pCPU"
    rows = bottom + 2 + len(WORDS)
    return svg.frame(title, (LABEL + COLUMNS) * svg.COLUMN, rows * svg.ROW, parts)


def _bar(pcpu: ProvedPcpu, parts: int) -> Iterator[str]:
    width = COLUMNS * svg.COLUMN / parts
    part_ms = pcpu.window_s * 1000 / parts
    left = LABEL * svg.COLUMN
    yield svg.text(0, 0, f"pCPU {pcpu.cpu}", "title")
    yield svg.text(0, 0.9, cut(safe(pcpu.verdict), LABEL, _OUTPUT), "faint")
    yield (
        f'<rect class="group" x="{left - 1:.1f}" y="1" width="{COLUMNS * svg.COLUMN + 2:.1f}" '
        f'height="{HEIGHT + 2}"/>'
    )
    floor = [0.0] * parts
    for run, times in _times(pcpu, parts).items():
        path = []
        for n, ran in enumerate(times):
            high = min(ran / part_ms, 1 - floor[n]) if part_ms else 0.0
            if high <= 0:
                continue
            high = max(high, 1 / HEIGHT)  # a short slice is a pixel, not nothing
            floor[n] = min(1.0, floor[n] + high)
            y = 2 + HEIGHT * (1 - floor[n])
            path.append(
                f"M{left + n * width:.1f} {y:.1f}h{width:.2f}v{high * HEIGHT:.1f}h-{width:.2f}z"
            )
        if path:
            yield _run(run, "".join(path))
    yield svg.text(LABEL, 1.75, cut(_foreign(pcpu), COLUMNS, _OUTPUT), "bad")


def _run(run: str, path: str) -> str:
    """Return an area in the colour of a class and with its pattern."""
    drawn = f'<path class="run-{run}" d="{path}"><title>{WORDS[run]}</title></path>'
    pattern = _PATTERNS.get(run)
    return drawn + (f'<path fill="url(#{pattern})" d="{path}"/>' if pattern else "")


def _times(pcpu: ProvedPcpu, parts: int) -> Mapping[str, Sequence[float]]:
    """Return the milliseconds of each class in each part of the window."""
    found = {run: [0.0] * parts for run in RUNS}
    for own in pcpu.own:
        _add(found["own"], own.timeline)
    for task in pcpu.tasks:
        _add(found[RUN_OF_CLASS.get(task.task_class, "foreign")], task.timeline)
    return found


def _add(times: list[float], timeline: Iterable[TimelinePart]) -> None:
    for one in timeline:
        if 0 <= one.part < len(times):
            times[one.part] += one.ran_ms


def _foreign(pcpu: ProvedPcpu) -> str:
    """Return the foreign tasks that ran longest, in words."""
    found = by_process(one for one in pcpu.tasks if one.task_class not in RUN_OF_CLASS)
    told = ", ".join(named(one) for one, _ in found[:NAMED])
    return told + (f", {len(found) - NAMED} more" if found[NAMED:] else "")


def named(task: RanTask) -> str:
    """Return a task's name, process and time."""
    name = safe(task.comm) or "gone"
    pid = f" (pid {task.pid})" if task.pid else ""
    return name + pid + (f" {milliseconds(task.total_ms)}" if task.total_ms is not None else "")


def histogram(proof: ProveDocument) -> str:
    """Return how long the foreign slices of all pCPUs were; empty if there were none."""
    bars: dict[float, int] = {}
    for pcpu in proof.pcpus:
        for bar in pcpu.histogram:
            bars[bar.up_to_us] = bars.get(bar.up_to_us, 0) + bar.slices
    most = max(bars.values(), default=0)
    if not most:
        return ""
    parts = []
    for n, (limit, slices) in enumerate(sorted(bars.items())):
        label = f"<= {microseconds(limit)}"
        width = COLUMNS * svg.COLUMN * slices / most * 0.85
        parts.append(svg.text(0, n, label))
        parts.append(
            f'<rect class="run-foreign" x="{LABEL * svg.COLUMN:.1f}" y="{n * svg.ROW + 2}" '
            f'width="{width:.1f}" height="{svg.ROW - 4}"/>'
        )
        parts.append(svg.text(LABEL + 0.7 + width / svg.COLUMN, n, str(slices)))
    title = "foreign slices by length"
    return svg.frame(title, (LABEL + COLUMNS) * svg.COLUMN, len(bars) * svg.ROW, parts)


# `prove --html`: a page with the verdict, the node, who ran when, and every task that ran.

STYLES = {"proved": "good", "violated": "bad", "unproved": "odd"}


def proof_document(proof: ProveDocument, state: State) -> str:
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
            table(_VERDICTS, map(_verdict, proof.pcpus), names=1, below=1),
            *_pictures(proof),
            "<h2>Other tasks that ran</h2>",
            table(_TASKS, _tasks(proof.pcpus), names=1, below=2),
            *_interrupts(proof.pcpus),
            *_guests(proof),
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
    *("pCPU", "owner", "verdict", "own", "waited", "pod", "foreign"),
    *("unavoidable", "idle", "interrupts", "foreign slices", "records", "lost", "why"),
)


def _verdict(pcpu: ProvedPcpu) -> Sequence[str]:
    owner = f"{pcpu.pod} ({pcpu.container})" if pcpu.container else pcpu.pod
    times = (pcpu.own_ms, waited_ms(pcpu), pcpu.pod_ms, pcpu.foreign_ms)
    return (
        *(str(pcpu.cpu), owner, pcpu.verdict),
        *map(_time, (*times, pcpu.unavoidable_ms, pcpu.idle_ms, pcpu.interrupt_ms)),
        "n/a" if pcpu.foreign_slices is None else str(pcpu.foreign_slices),
        *(str(pcpu.records), str(pcpu.lost), pcpu.reason),
    )


def _time(ms: float | None) -> str:
    """Return a time in a unit that keeps a column narrow."""
    return milliseconds(ms) if ms is None or ms < 1000 else f"{ms / 1000:.3f} s"


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
                *(str(one.slices), _time(one.total_ms), _time(one.longest_ms)),
                *(one.remedy, one.command),
            )


def _interrupts(pcpus: Iterable[ProvedPcpu]) -> Iterator[str]:
    rows = [
        (
            *(str(pcpu.cpu), one.interrupt, one.name if one.irq < 0 else f"{one.name} ({one.irq})"),
            *(
                str(one.times),
                _time(one.total_ms),
                _time(one.longest_ms),
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
        yield table(titles, rows, names=1, below=2)


_FELT: Final = (
    *(one.lower().replace("-", " ").replace("pcpus", "pCPUs") for one in FELT),
    "exits of 0.1 ms or more",
    "also on its pCPU",
)


def _guests(proof: ProveDocument) -> Iterator[str]:
    """Yield what each guest felt, and what the host did meanwhile."""
    for guest in proof.guests:
        yield f"<h2>What the guest of {escape(safe(guest.pod))} feels</h2>"
        rows = [(*felt(vcpu, proof.asked_s), exits(vcpu), causes(vcpu)) for vcpu in guest.vcpus]
        yield table(_FELT, rows, names=1, below=2)
        notes = (polling(guest, proof.asked_s), *guest.problems)
        yield from (paragraph(note) for note in notes if note)
        if guest.commands:
            yield paragraph(INSIDE)
            rows = [(one.container, one.program, one.command) for one in guest.commands]
            yield table(("container", "program", "command"), rows, names=1, below=1)
