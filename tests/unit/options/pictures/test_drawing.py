"""The node drawn: what each pCPU is, where its box goes, and SVG and HTML that nothing breaks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace
from rich.style import Style

from kata_pin.base.cpuset import CpuPlace, CpuSet
from kata_pin.base.documents.check import Finding, Foreign, Measurement
from kata_pin.base.documents.pools import Holder
from kata_pin.base.documents.state import Sandbox, State
from kata_pin.base.values import HolderSource
from kata_pin.cli.render.layout import Output
from kata_pin.cli.reports.findings import Looked
from kata_pin.options.pictures import command, page, svg
from kata_pin.options.pictures.picture import (
    MAX_NAME,
    Box,
    Detail,
    Picture,
    Tile,
    Use,
    cut,
    fitted,
    laid_out,
    picture,
    shortened,
)
from tests.unit.cli import documents as docs

SVG = "{http://www.w3.org/2000/svg}"
EVIL = (
    "</title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&lt;]]>\x1b[31m\u202e\ud800"
)


def tiles(state: State, **given: Any) -> dict[int, Tile]:
    """Return the tiles of a node by pCPU."""
    return {one.number: one for one in picture(state, Output(80), **given).tiles}


def on(places: tuple[CpuPlace, ...], *sandboxes: Sandbox, **facts: str) -> State:
    """Return a node of other pCPUs, without a kubelet."""
    state = docs.state(*sandboxes, cpus=len(places), kubelet=None, **facts)
    return replace(state, node=replace(state.node, cpus=places))


def sized(count: int, *, smt: bool) -> Picture:
    """Return a node of two sockets with a VM of a vCPU on every second pCPU."""
    mine = range(0, count, 2)
    threads = [docs.thread(100 + n, "vcpu", str(cpu), vcpu=n) for n, cpu in enumerate(mine)]
    cpus = str(CpuSet(mine))
    vm = docs.sandbox("shop/web", cpus, *threads, exclusive=cpus)
    places = docs.places(count, nodes=2 if count > 4 else 1, smt=smt)
    return picture(on(places, vm), Output(80))


def placed(box: Box, left: int = 0, top: int = 0) -> Iterator[tuple[Box, int, int]]:
    """Yield each box with its place on the grid."""
    yield box, left, top
    for child in box.children:
        yield from placed(child, left + box.inset + child.x, top + box.inset + child.y)


def check_boxes(whole: Box, found: Picture) -> None:
    """Each pCPU has one tile; nothing leaves its box, overlaps a neighbour, or covers its text."""
    drawn = [box.tile.number for box, _, _ in placed(whole) if box.tile]
    assert sorted(drawn) == sorted(one.number for one in found.tiles)
    for box, _, _ in placed(whole):
        inside = (box.width - 2 * box.inset, box.height - 2 * box.inset)
        taken: set[tuple[int, int]] = set()
        for child in box.children:
            cells = {
                (x, y)
                for x in range(child.x, child.x + child.width)
                for y in range(child.y, child.y + child.height)
            }
            assert not cells & taken
            taken |= cells
            assert 0 <= child.x <= child.x + child.width <= inside[0]
            assert 0 <= child.y <= child.y + child.height <= inside[1]
        assert len(box.title) + (5 if not box.tile else 2) <= box.width or not box.framed
        assert len(box.lines) + 2 * box.inset <= box.height


@pytest.mark.parametrize("detail", Detail)
@pytest.mark.parametrize("width", [80, 100, 132, 200])
@pytest.mark.parametrize("count", [2, 4, 8, 16, 64, 128, 256])
def test_boxes_fit_into_each_other(count: int, width: int, detail: Detail) -> None:
    """At any size, width and detail."""
    found = sized(count, smt=count > 2)
    whole = laid_out(found, Output(width), detail, 17)
    assert whole.width <= width
    check_boxes(whole, found)


def titles(state: State) -> list[str]:
    """Return the titles of the boxes at 200 columns."""
    return [
        box.title
        for box, _, _ in placed(fitted(picture(state, Output(200)), Output(200)))
        if box.title and not box.tile
    ]


def test_pcpus_of_pods_without_a_vm_are_not_free() -> None:
    """The kubelet gave them away; those of a sandbox stay the sandbox's."""
    exclusive = docs.sandbox("p1", exclusive="4-5", mask="4-5")
    found = tiles(docs.state(exclusive, assigned="4-5,12", kubelet=None))
    assert [found[cpu].use for cpu in (4, 12, 13)] == [Use.EXCLUSIVE, Use.EXCLUSIVE, Use.FREE]
    assert found[12].owner == "pods without a VM"


def test_a_node_of_several_packages_holds_them() -> None:
    """Without NUMA the packages are inside the one node."""
    places = tuple(replace(one, node=0) for one in docs.places(8, nodes=2))
    found = titles(on(places))
    assert [one.partition(" · ")[0] for one in found] == ["NUMA node 0", "package 0", "package 1"]


def test_a_package_is_one_box_wherever_its_nodes_are() -> None:
    """NUMA nodes may be numbered across the packages."""
    places = tuple(
        replace(one, node=one.cpu // 2, package=one.cpu // 2 % 2, llc=0) for one in docs.places(8)
    )
    found = titles(on(places))
    assert [one.partition(" ·")[0] for one in found] == [
        *("package 0", "NUMA node 0", "NUMA node 2"),
        *("package 1", "NUMA node 1", "NUMA node 3"),
    ]
    check_boxes(
        fitted(picture(on(places), Output(80)), Output(80)), picture(on(places), Output(80))
    )


@pytest.mark.parametrize(("count", "detail"), [(2, 3), (8, 3), (64, 2), (256, 1)])
def test_tiles_say_less_where_there_is_less_room(count: int, detail: int) -> None:
    """On a terminal of 80 columns."""
    whole = fitted(sized(count, smt=count > 2), Output(80))
    rows = {len(box.lines) for box, _, _ in placed(whole) if box.tile}
    assert rows == {detail}
    assert whole.height <= 80


def test_uses_and_owners() -> None:
    """Pools, grants outside of sandboxes, and pCPUs that others gave are told apart."""
    found = tiles(docs.allotted())
    uses = {use: str(CpuSet(n for n, one in found.items() if one.use is use)) for use in Use}
    assert uses == {
        Use.EXCLUSIVE: "2,6-7,10",
        Use.SHARED: "1,8-9",
        Use.RESERVED: "0",
        Use.HOUSEKEEPING: "3",
        Use.FREE: "4-5,11-15",
        Use.OFFLINE: "",
    }
    assert found[6].owner == "media/\\x1b[31mencoder (x264)"
    assert found[10].owner == "media/\\x1b[31mplayer (mixer)"
    aside = tiles(docs.allotted(suspended="the kubelet decides"))
    assert aside[6].use is Use.FREE
    assert {aside[0].use, aside[3].use}.isdisjoint({Use.RESERVED, Use.HOUSEKEEPING})
    assert aside[2].use is Use.EXCLUSIVE  # given by others, whoever decides


def test_a_container_is_drawn_with_its_sandbox_only() -> None:
    """Others' claim to its pCPUs is no owner beside it; that of a container elsewhere is one."""
    sandbox = docs.database()
    held = Holder("elsewhere", "shop/x", "c", "4", HolderSource.CLAIM, "a claim")
    for identity, drawn in (("elsewhere", True), (sandbox.containers[0].id, False)):
        state = docs.allotted(holders=(replace(held, id=identity),))
        names = [
            one.name for one in picture(replace(state, sandboxes=(sandbox,)), Output(80)).owners
        ]
        assert ("shop/x (c)" in names) is drawn


def test_conflicts_and_drift_are_marked_where_they_matter() -> None:
    """Findings of `check` are on the exclusive pCPUs that they concern, and on no others."""
    late = docs.sandbox("other/late", "5-6", state="conflict", exclusive="5")
    found = tiles(docs.state(docs.database(), docs.drifted(), late))
    kinds = {number: [one.kind for one in tile.problems] for number, tile in found.items()}
    assert kinds[5] == ["drift", "drift", "conflict"]
    assert kinds[12] == ["drift", "drift"]
    assert kinds[0] == kinds[6] == []
    assert found[5].key == "*"
    assert found[5].owner == "2 owners"
    assert found[4].roles == "vcpu 1"


@pytest.mark.parametrize(
    ("mine", "theirs", "meaning"),
    [
        ("4", "6", "of one container alone"),
        ("4-5", "5-6", "of one container alone, but 5 of several: a conflict"),
        ("4-5", "4-5", "of several: a conflict"),
    ],
)
def test_a_pcpu_of_two_owners_is_not_of_one_alone(mine: str, theirs: str, meaning: str) -> None:
    """The legend says what it is."""
    sandboxes = [
        docs.sandbox(f"shop/{n}", cpus, exclusive=cpus) for n, cpus in enumerate((mine, theirs))
    ]
    state = docs.state(*sandboxes)
    assert f", {meaning})" in "\n".join(
        one.plain for one in command.picture_lines(state, Output(200))
    )
    assert f"exclusive: {meaning} (" in svg.document(state)


def test_foreign_time_is_drawn() -> None:
    """As a share in the tile, as a bar in SVG, and as a line below."""
    state = docs.state(docs.database())
    found = picture(state, Output(80), foreign={4: 0.761, 5: 0.0004})
    shown = "\n".join(
        line for box, _, _ in placed(fitted(found, Output(80))) if box.tile for line in box.lines
    )
    assert "▲76% foreign" in shown
    assert "▲0.1% foreign" in shown
    drawn = svg.standalone("x", found)
    assert drawn.count('class="time"') == 2
    assert "pCPU 4: foreign tasks ran 76% of the time" in drawn


def test_what_check_measures_is_marked() -> None:
    """A finding is told once, with its share on the tile; kernel threads are a share alone."""
    worker = Finding("foreign", False, "x", "5", "kworker", foreign=Foreign(5, 1.2, ()))
    intruder = Finding(
        "foreign", True, "x", "4", "pCPU 4: others had it 76 % of 2 s", foreign=Foreign(4, 76.0, ())
    )
    how = Measurement("4-5", 2.0, "perf", 0.1)
    looked = Looked((intruder, worker), ("pCPU 5: 3 records lost",), measured=how)
    state = docs.state(docs.database(), docs.sandbox("other/late", "5", exclusive="5"))
    found = picture(state, Output(80), looked)
    lines = [line.plain for line in command.picture_lines(state, Output(200), looked)]
    text = "\n".join(lines)
    assert "▲76% foreign" in text
    assert "!conflict ▲1.2%" in text
    assert "! foreign: pCPU 4: others had it 76 % of 2 s" in lines
    assert "pCPU 5: foreign tasks ran 1.2% of the time" in lines
    assert "pCPU 4: foreign" not in text
    assert "2 exclusive pCPUs measured for 2 s by records of every task switch (perf)" in lines
    assert "could not tell: pCPU 5: 3 records lost" in lines
    for written in (svg.document(state, looked), page.document(state, looked)):
        assert "could not tell: pCPU 5: 3 records lost" in written
        assert "! foreign: pCPU 4: others had it 76 % of 2 s" in written
    check_boxes(fitted(found, Output(80)), found)


def test_keys_go_on_after_the_alphabet() -> None:
    """250 owners have 250 keys."""
    pods = [docs.sandbox(f"p/{n}", str(n), exclusive=str(n)) for n in range(250)]
    found = picture(docs.state(*pods, cpus=256, kubelet=None), Output(80))
    assert [one.key for one in found.owners][24:28] == ["Y", "Z", "AA", "AB"]
    assert len({one.key for one in found.owners}) == 250
    whole = fitted(found, Output(80))
    check_boxes(whole, found)
    assert whole.width <= 80


def hostile(name: str) -> State:
    """Return a node whose pod, host, threads and messages all have one name."""
    one = docs.sandbox(
        "plain",
        "4-5",
        docs.thread(1, "vcpu", "4", vcpu=0, label=name, state="drift", expected="5"),
        docs.thread(2, name, "5", state="drift", expected="4"),
        exclusive="4",
        vmm=docs.vmm(kind=name, orphan=True),
    )
    one = replace(one, pod=name)
    return docs.without_daemon(docs.state(one, hostname=name, kernel=name, isolated="4"), name)


NAMES = [
    pytest.param(EVIL, id="markup"),
    pytest.param("x" * 100_000, id="long"),
    pytest.param("a" + "\u0301" * 5000, id="combining"),
    pytest.param("数据库" * 200, id="wide"),
    pytest.param("\x00\x1b]0;t\x07\r\n\x9b2J\u2028\ufffe\U000e0001", id="controls"),
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_no_markup_in_svg(name: str) -> None:
    """The file is well-formed, of known elements, of bounded size, and loads nothing."""
    drawn = svg.document(hostile(name))
    root = ElementTree.fromstring(drawn)
    kinds = {one.tag.removeprefix(SVG) for one in root.iter()}
    assert kinds <= {
        *("svg", "title", "style", "defs", "pattern", "path", "circle", "rect", "text", "g"),
    }
    assert all(
        not key.startswith("on") and "href" not in key for e in root.iter() for key in e.attrib
    )
    shown = [one.text or "" for one in root.iter() if one.tag in {f"{SVG}text", f"{SVG}title"}]
    assert all(line.isprintable() for text in shown for line in text.split("\n"))
    assert len(drawn) < 60_000


class Tags(HTMLParser):
    """Collects the elements of a page with their attributes, and its texts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Keep it."""
        self.texts.append(data)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_no_markup_in_html(name: str) -> None:
    """The page has no element, attribute or reference that a name brought."""
    text = page.document(hostile(name))
    tags = Tags()
    tags.feed(text)
    plain = Tags()
    plain.feed(page.document(hostile("plain")))
    assert {tag for tag, _ in tags.found} == {tag for tag, _ in plain.found}
    assert not {"script", "img", "link", "iframe", "a"} & {tag for tag, _ in tags.found}
    assert all(not key.startswith("on") for _, attrs in tags.found for key in attrs)
    assert all(line.isprintable() for one in tags.texts for line in one.split("\n"))
    assert len(text) < 100_000


def test_the_page_may_load_nothing() -> None:
    """Its policy forbids the browser every request and script."""
    text = page.document(docs.state(docs.database()))
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "").replace(
        'http-equiv="', ""
    )


def test_names_are_cut() -> None:
    """By their width, not their length; also by their length, as characters may have no width."""
    assert cut("数据库数据库", 5, Output()) == "数据…"
    assert cut("x" * 9, 5, Output(unicode=False)) == "xxx.."
    assert len(cut("a" + "\u0301" * 500, 5, Output())) <= 11
    assert shortened("namespace/deployment-7f9c-x2x4q", 15, Output()) == "name…7f9c-x2x4q"
    assert shortened("media/player (mixer)", 15, Output()) == "medi…er (mixer)"
    owner = picture(docs.state(docs.sandbox("x" * 9999, "1")), Output()).owners[0]
    assert len(owner.name) == MAX_NAME


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_of_a_terminal_can_be_read() -> None:
    """Black on each colour of an owner; the sign of an exclusive pCPU has the terminal's own."""
    owned = [docs.sandbox(f"p/{n}", str(n), exclusive=str(n)) for n in range(8)]
    lines = command.picture_lines(docs.state(*owned, cpus=64, kubelet=None), Output(120))
    styles = [Style.parse(str(span.style)) for line in lines for span in line.spans]
    pairs = {(one.color, one.bgcolor) for one in styles if one.color and one.bgcolor}
    assert len(pairs) == 8
    for ink, ground in pairs:
        assert contrast(ink.get_truecolor().hex, ground.get_truecolor().hex) > 7
    signs = [
        (span.style, line.plain[span.start : span.end]) for line in lines for span in line.spans
    ]
    assert not [style for style, text in signs if "█" in text and "on color" in str(style)]


@pytest.mark.parametrize("colours", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_colours_can_be_read(colours: svg.Theme) -> None:
    """Text has 4.5 times the luminance of what is behind it, or the reverse; borders 3 times."""
    for fill, strong in (colours.plain, *colours.owners):
        assert contrast(colours.text, fill) >= 7
        assert contrast(colours.bad, fill) >= 4.5
        assert contrast(strong, fill) >= 3
        assert contrast(colours.foreign, fill) >= 3
    for ground in (colours.page, colours.group):
        assert contrast(colours.text, ground) >= 7
        assert contrast(colours.faint, ground) >= 4.5
        assert contrast(colours.bad, ground) >= 4.5


def test_a_pipe_gets_a_picture_of_bounded_width() -> None:
    """An output without a width is drawn as a wide terminal."""
    lines = command.picture_lines(docs.large(), Output(10**6))
    assert max(line.cell_len for line in lines if re.search("[│┌└]", line.plain)) <= 200


def test_a_style_is_switched_on_once() -> None:
    """Not for each character: a picture of 256 pCPUs is seen over slow lines too."""
    output = Output(200)
    for line in command.drawn(fitted(picture(docs.large(), output), output), output):
        for one, following in pairwise(line.spans):
            assert one.end < following.start or one.style != following.style
