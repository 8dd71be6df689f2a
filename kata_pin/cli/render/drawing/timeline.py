"""Who ran on each exclusive pCPU, when, and how long foreign slices were: two pictures in SVG.

Made of the `prove` document. Times of a class are drawn as a share of each part of the window, from
the bottom: the owner's threads, its pod's other tasks, unavoidable kernel threads, foreign tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from kata_pin.cli.render.drawing import svg
from kata_pin.cli.render.drawing.boxes import cut
from kata_pin.cli.render.drawing.theme import RUNS
from kata_pin.cli.render.layout import Output
from kata_pin.cli.render.prove import microseconds, milliseconds
from kata_pin.cli.reports.words import safe
from kata_pin.model.reports.prove import ProveDocument, ProvedPcpu, RanTask, TimelinePart
from kata_pin.policy.isolation.tables import by_process

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
