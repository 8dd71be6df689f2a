"""The page of `prove`: verdicts, who ran when, and names that do nothing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kata_pin.cli.render.drawing import proof
from kata_pin.cli.render.drawing.svg import COLUMN
from kata_pin.cli.render.drawing.timeline import COLUMNS, HEIGHT, histogram, timelines
from kata_pin.model.reports.prove import ProveDocument, TimelinePart
from tests.unit.cli.proved import owned, proved
from tests.unit.cli.render.test_drawing import NAMES, Tags, hostile


def spread() -> ProveDocument:
    """Return a window in which pCPU 4 is half its owner's and then half an intruder's."""
    found = proved()
    pcpu = found.pcpus[0]
    part_ms = pcpu.window_s * 1000 / found.parts
    half = [TimelinePart(n, part_ms / 2) for n in range(found.parts)]
    (own,) = pcpu.own
    task = replace(pcpu.tasks[0], timeline=tuple(half[30:]))
    own = replace(own, timeline=tuple(half))
    return replace(found, pcpus=(replace(pcpu, own=(own,), tasks=(task,)),))


def areas(drawn: str) -> dict[str, list[tuple[float, ...]]]:
    """Return the rectangles (x, y, width, height) of each class in a timeline's bars."""
    drawn = drawn.partition(">0 s<")[0]  # the legend follows
    found: dict[str, list[tuple[float, ...]]] = {}
    for run, path in re.findall(r'class="run-(\w+)" d="(M[^"]*v[^"]*h[^"]*)"', drawn):
        boxes = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h", path)
        found.setdefault(run, []).extend(tuple(map(float, box)) for box in boxes)
    return found


def test_the_timeline_has_each_class_where_it_ran() -> None:
    """The owner's half from the bottom in all parts, the intruder's above it in the later ones."""
    found = areas(timelines(spread()))
    own, foreign = found["own"], found["foreign"]
    assert len(own) == 60
    assert len(foreign) == 30
    assert all(y == 2 + HEIGHT / 2 and high == HEIGHT / 2 for _, y, _, high in own)
    assert all(y == 2 and high == HEIGHT / 2 for _, y, _, high in foreign)
    assert foreign[0][0] == own[30][0]
    assert own[-1][0] + own[-1][2] == pytest.approx(own[0][0] + COLUMNS * COLUMN, abs=0.5)


def test_a_short_slice_can_be_seen() -> None:
    """A microsecond of a foreign task is a pixel, where the owner left any room."""
    found = spread()
    pcpu = found.pcpus[0]
    task = replace(pcpu.tasks[0], timeline=(TimelinePart(3, 0.001),))
    drawn = timelines(replace(found, pcpus=(replace(pcpu, tasks=(task,)),)))
    ((_, _, _, high),) = areas(drawn)["foreign"]
    assert high == 1


def test_parts_that_a_document_has_too_many_of_are_left_out() -> None:
    """A number outside the window neither fails nor draws."""
    found = spread()
    pcpu = found.pcpus[0]
    task = replace(pcpu.tasks[0], timeline=(TimelinePart(-1, 5), TimelinePart(60, 5)))
    assert "foreign" not in areas(timelines(replace(found, pcpus=(replace(pcpu, tasks=(task,)),))))


def test_what_was_not_measured_is_not_drawn() -> None:
    """A method without times has no timeline, and no foreign slices no histogram."""
    found = proved()
    assert timelines(replace(found, parts=0)) == ""
    assert histogram(replace(found, pcpus=found.pcpus[1:])) == ""
    assert histogram(found).count('class="run-foreign"') > 3


def test_the_page_says_what_the_document_says() -> None:
    """Verdict, pCPUs, tasks with their remedies, interrupts, and the share on the node's tile."""
    text = proof.document(proved(irq=True), owned())
    tags = Tags()
    tags.feed(text)
    words = "\n".join(tags.texts)
    for told in (
        *("violated: 1 pCPU violated (4)", "shop/database (postgres)", "sh \\x1b[31m"),
        *("systemctl set-property cron.service AllowedCPUs=0-3,7-15", "local_timer"),
        *("pCPU 4: foreign tasks ran 15% of the time", "nvme0q5 (36)", "waited\n", "1546.000 ms"),
    ):
        assert told in words


@pytest.mark.parametrize("name", NAMES)
def test_names_of_tasks_are_no_markup(name: str) -> None:
    """Whatever a task, its unit, its parent or an interrupt is called."""
    found = proved(irq=True)
    tasks = tuple(
        replace(one, comm=name, parent=name, unit=name, cgroup=name, remedy=name, command=name)
        for one in found.pcpus[0].tasks
    )
    interrupts = tuple(replace(one, name=name) for one in found.pcpus[0].interrupts)
    pcpu = replace(
        found.pcpus[0], tasks=tasks, interrupts=interrupts, reason=name, container=name, pod=name
    )
    text = proof.document(replace(found, pcpus=(pcpu,), reason=name), hostile(name))
    tags, plain = Tags(), Tags()
    tags.feed(text)
    plain.feed(proof.document(found, hostile("plain")))
    assert {tag for tag, _ in tags.found} <= {tag for tag, _ in plain.found}
    assert all(not key.startswith("on") for _, attrs in tags.found for key in attrs)
    assert all(line.isprintable() for one in tags.texts for line in one.split("\n"))
    assert len(text) < 150_000
