"""The page of `prove`: verdicts, who ran when, and names that do nothing."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.measured import ProveDocument, TimelinePart
from kata_pin.options.pictures import page
from kata_pin.options.pictures.page import COLUMNS, HEIGHT, histogram, timelines
from kata_pin.options.pictures.svg import COLUMN
from tests.unit.cli.proved import owned, proved
from tests.unit.options.pictures.test_drawing import NAMES, Tags, hostile


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


def test_a_part_is_never_fuller_than_full() -> None:
    """Times that do not add up, as of a part cut elsewhere, stay inside of the bar."""
    found = spread()
    pcpu = found.pcpus[0]
    whole_ms = pcpu.window_s * 1000 / found.parts
    task = replace(pcpu.tasks[0], timeline=(TimelinePart(3, whole_ms),))
    drawn = timelines(replace(found, pcpus=(replace(pcpu, tasks=(task,)),)))
    ((_, y, _, high),) = areas(drawn)["foreign"]
    assert (y, high) == (2, HEIGHT / 2)


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
    text = page.proof_document(proved(irq=True), owned())
    tags = Tags()
    tags.feed(text)
    words = "\n".join(tags.texts)
    for told in (
        *("violated: 1 pCPU violated (4)", "shop/database (postgres)", "sh \\x1b[31m"),
        *("systemctl set-property cron.service AllowedCPUs=0-3,7-15", "local_timer"),
        *("pCPU 4: foreign tasks ran 15% of the time", "nvme0q5 (36)", "waited\n", "1.546 s"),
    ):
        assert told in words


def test_sentences_have_a_line_of_their_own() -> None:
    """Why, remedies and commands are below their row, so that no column breaks their words."""
    text = page.proof_document(proved(irq=True), owned())
    below = re.findall(r'<tr class="below"><td data-title="(\w+)" colspan="(\d+)">', text)
    assert {("why", "13"), ("remedy", "9"), ("command", "9"), ("remedy", "6")} <= set(below)
    head, *rows = re.findall(r"<tr>.*?</tr>", text)
    assert all(title not in re.sub("<[^>]*>", " ", head) for title in ("why", "remedy", "command"))
    assert all("<td>" not in row for row in rows), "every cell is named where it stands alone"


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
    text = page.proof_document(replace(found, pcpus=(pcpu,), reason=name), hostile(name))
    tags, plain = Tags(), Tags()
    tags.feed(text)
    plain.feed(page.proof_document(found, hostile("plain")))
    assert {tag for tag, _ in tags.found} <= {tag for tag, _ in plain.found}
    assert all(not key.startswith("on") for _, attrs in tags.found for key in attrs)
    assert all(line.isprintable() for one in tags.texts for line in one.split("\n"))
    assert len(text) < 150_000
