"""The boxes as SVG, and the colours of pictures and pages, light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from msgspec import Struct

from kata_pin.base.documents.state import State
from kata_pin.base.values import count
from kata_pin.cli.render.layout import Output
from kata_pin.cli.reports.findings import NOTHING, Looked
from kata_pin.cli.reports.words import safe
from kata_pin.options.pictures.picture import (
    MAX_NAME,
    SEVERAL,
    Box,
    Choice,
    Detail,
    Picture,
    Tile,
    Use,
    cut,
    fitted,
    percent,
    picture,
    shortened,
)

# Colours of pictures and pages, light and dark: the reader's system chooses (CSS media query).
#
# No variables of CSS: programs other than browsers that show SVG do not know them.


class Theme(Struct, frozen=True):
    """Colours as #rrggbb. Each owner has a pair: behind text, and of strips and borders."""

    page: str
    text: str
    faint: str  # text that matters less, borders of groups
    group: str  # behind a NUMA node
    plain: tuple[str, str]  # the pair of what has no owner, or several
    bad: str  # borders and text of problems
    foreign: str  # foreign tasks' time
    good: str  # a verdict that is as it should be
    owners: tuple[tuple[str, str], ...]


LIGHT: Final = Theme(
    page="#ffffff",
    text="#1b1f24",
    faint="#59636e",
    group="#f3f5f7",
    plain=("#ffffff", "#6e7781"),
    bad="#b3001b",
    foreign="#a84300",
    good="#0b6b3a",
    owners=(
        ("#d3e5f8", "#1f6fb5"),
        ("#fbe3c9", "#b45309"),
        ("#cfeedd", "#0b7a53"),
        ("#eedcf4", "#8e3fa8"),
        ("#f5eeb0", "#857400"),
        ("#fad6e2", "#b8326b"),
        ("#c9eef0", "#007680"),
        ("#eadfce", "#7a5230"),
    ),
)

DARK: Final = Theme(
    page="#0d1117",
    text="#f0f3f6",
    faint="#9da7b1",
    group="#161b22",
    plain=("#0d1117", "#8b949e"),
    bad="#ff8182",
    foreign="#ffb060",
    good="#56d38c",
    owners=(
        ("#12304c", "#6cb6ff"),
        ("#43270b", "#f0a050"),
        ("#0c3b2a", "#4fd0a0"),
        ("#38203f", "#d39be6"),
        ("#383206", "#e3d34f"),
        ("#451a2c", "#f58ab0"),
        ("#093538", "#58d3dc"),
        ("#36291b", "#cda57c"),
    ),
)

RUNS: Final = ("own", "pod", "unavoidable", "foreign")
"""Whose tasks ran, from the bottom of a timeline's bar to its top."""

DARK_MEDIA: Final = "@media screen and (prefers-color-scheme:dark){"
"""Paper is light, whatever the reader's screen is."""

FONT: Final = "ui-monospace,'DejaVu Sans Mono','Liberation Mono',Menlo,Consolas,monospace"

_FIXED: Final = f"""
text,.mono{{font-family:{FONT};font-size:13px;white-space:pre}}
text{{unicode-bidi:isolate;direction:ltr}}
.title{{font-weight:bold}}
.group,.core{{stroke-width:1}}
.core{{fill:none}}
.shared>.edge{{stroke-width:1}}
.exclusive>.edge{{stroke-width:2}}
.reserved>.edge{{stroke-width:2;stroke-dasharray:9 3}}
.housekeeping>.edge{{stroke-width:2;stroke-dasharray:2 3}}
.free>.edge,.offline>.edge{{stroke-width:1;stroke-dasharray:1 3}}
.problem>.edge{{stroke-width:4;stroke-dasharray:none}}
"""


def style() -> str:
    """Return the rules of pictures for both themes."""
    rules = [_FIXED, *_rules(LIGHT), DARK_MEDIA, *_rules(DARK), "}"]
    return "\n".join(one.strip() for one in rules)


def _rules(theme: Theme) -> Iterator[str]:
    yield f"svg.picture{{background:{theme.page}}}"
    yield f"text{{fill:{theme.text}}}"
    yield f".group{{fill:{theme.group};stroke:{theme.faint}}}"
    yield f".core{{stroke:{theme.faint}}}"
    yield f".gap{{stroke:{theme.page};fill:{theme.page}}}"
    owners = ((f"owner{n}", pair) for n, pair in enumerate(theme.owners))
    for name, (fill, strong) in (("plain", theme.plain), *owners):
        yield f".{name}>.edge{{fill:{fill};stroke:{strong}}}"
        yield f".{name}>.strip{{fill:{strong}}}"
    yield f".problem>.edge{{stroke:{theme.bad}}}"
    yield f".bad,text.bad{{fill:{theme.bad};color:{theme.bad}}}"
    yield f".time{{fill:{theme.foreign}}}"
    runs = theme.owners[0][1], theme.owners[6][1], theme.plain[1], theme.bad
    for name, colour in zip(RUNS, runs, strict=True):
        yield f".run-{name}{{fill:{colour}}}"
    yield f"text.faint{{fill:{theme.faint}}}"


def owner_class(colour: int | None) -> str:
    """Return the class of an owner's colours; beyond the last colour they start again."""
    return "plain" if colour is None else f"owner{colour % len(LIGHT.owners)}"


def page_style() -> str:
    """Return the rules of a page around pictures."""
    light, dark = "".join(_page_rules(LIGHT)), "".join(_page_rules(DARK))
    return f"{_PAGE}{light}\n{DARK_MEDIA}{dark}}}"


_PAGE: Final = """
svg[width="0"]{position:absolute}
body{font-family:system-ui,sans-serif;font-size:15px;line-height:1.45;margin:1.5rem;max-width:100rem}
h1{font-size:1.4rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin-top:1.8rem}
p{margin:.3rem 0;overflow-wrap:anywhere}
.verdict{font-size:1.2rem;font-weight:bold}
.wide{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:13px}
th,td{text-align:left;vertical-align:top;padding:.2rem .4rem;border-top:1px solid}
tr.below>td{border-top:none}tr.below>td::before{content:attr(data-title) ": "}
.short{white-space:nowrap}.long{display:inline-block;min-width:9rem;overflow-wrap:anywhere}
@media (min-width:50rem){svg.picture{max-width:100%;height:auto}}
@media screen and (max-width:50rem){
body{margin:1rem}thead{display:none}table,tbody,tr,th,td{display:block}
td,th{border-top:none;padding:.1rem 0}tr:not(.below){border-top:1px solid;padding-top:.3rem}
td:empty{display:none}tbody th::before,td::before,tr.below>td::before{content:attr(data-title) ": "}
.long{display:inline;min-width:0}
}
@media print{
@page{size:landscape;margin:10mm}
body{margin:0;font-size:12px}table{font-size:10px}.wide{overflow:visible}
svg.picture{max-width:100%;height:auto}tr,svg.picture{break-inside:avoid}h2{break-after:avoid}
}
"""


def _page_rules(theme: Theme) -> Iterator[str]:
    yield f"body{{background:{theme.page};color:{theme.text}}}"
    yield f"tr,th,td{{border-color:{theme.faint}}}thead th{{background:{theme.group}}}"
    yield f".good{{color:{theme.good}}}.odd{{color:{theme.foreign}}}"


# `draw --svg`: the boxes as SVG, with the legend below them.
#
# One self-contained file: no script, no font, no link. Names come from pods: every text is
# printable (words.safe), cut to its place, and escaped; a tile clips what is drawn in it.

COLUMN, ROW, MARGIN = 8.4, 19, 12
"""Pixels of a character's place and around the picture; letters of 13 px are 7.8 px wide."""

WIDTH: Final = 150
"""Columns that a picture may have."""

ENTRY: Final = 48
"""Columns of an owner in the legend."""

MAX_PROBLEMS: Final = 20
"""Findings that are written out."""

MAX_DETAILS: Final = 800
"""Characters of a tile's tooltip."""

_OUTPUT: Final = Output(WIDTH, unicode=True)
_CHOICES: Final[tuple[Choice, ...]] = (
    (Detail.OWNER, 28, 30),
    (Detail.OWNER, 20, 90),
    (Detail.ROLE, 11, 0),
)

PATTERNS: Final = """<defs>
<pattern id="shared" width="6" height="6" patternUnits="userSpaceOnUse">
<path class="gap" d="M0 6L6 0M-1 1L1 -1M5 7L7 5" stroke-width="2"/></pattern>
<pattern id="reserved" width="6" height="6" patternUnits="userSpaceOnUse">
<path class="gap" d="M0 3H6M3 0V6" stroke-width="2"/></pattern>
<pattern id="housekeeping" width="5" height="5" patternUnits="userSpaceOnUse">
<circle class="gap" cx="2.5" cy="2.5" r="1.7"/></pattern>
</defs>"""
"""Drawn over the strip of a tile in the page's colour; an exclusive strip stays whole.

Once per file: a page has several pictures.
"""


def document(state: State, looked: Looked = NOTHING) -> str:
    """Return a whole SVG file about a node."""
    return standalone(title_of(state), picture(state, _OUTPUT, looked))


def title_of(state: State) -> str:
    """Return a picture's title."""
    return cut(f"{safe(state.node.hostname)}, {safe(state.time)}", MAX_NAME, _OUTPUT)


def standalone(title: str, found: Picture) -> str:
    """Return a picture as a whole SVG file."""
    box = fitted(found, _OUTPUT, _CHOICES)
    columns = max(box.width, 2 * ENTRY)
    heading = text(0, 0, cut(safe(title), columns, _OUTPUT), "title")
    below = [*_signs(found), *_owners(found, columns), *_wrong(found, columns)]
    return _stacked(title, columns, [f"<style>{style()}</style>{PATTERNS}{heading}"], box, below)


def embedded(title: str, found: Picture) -> str:
    """Return the picture with its signs only, for a page that has the style and the rest."""
    box = fitted(found, _OUTPUT, _CHOICES)
    return _stacked(title, max(box.width, ENTRY), [], box, list(_signs(found)))


def _stacked(title: str, columns: int, above: Sequence[str], box: Box, below: Sequence[str]) -> str:
    """Return rows, the boxes and rows, below each other."""
    parts = [*above, f'<g transform="translate(0 {2 * ROW * len(above)})">', *_drawn(box), "</g>"]
    row = 2 * len(above) + box.height + 1
    for n, line in enumerate(below):
        parts.append(f'<g transform="translate(0 {(row + n) * ROW})">{line}</g>')
    return frame(title, columns * COLUMN, (row + len(below)) * ROW, parts)


def frame(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """Return an SVG element of that inner size, in pixels, without the patterns."""
    wide, high = width + 2 * MARGIN, height + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img" '
        f'width="{wide:.0f}" height="{high:.0f}" viewBox="{-MARGIN} {-MARGIN} {wide:.0f} '
        f'{high:.0f}"><title>{escape(safe(title))}</title>'
        f"{''.join(parts)}</svg>\n"
    )


def text(column: float, row: float, content: str, css: str = "") -> str:
    """Return a text at a place of the grid; it has to be printable."""
    named = f' class="{css}"' if css else ""
    x, y = column * COLUMN, row * ROW + 14
    return f'<text x="{x:.1f}" y="{y:.0f}"{named}>{escape(content)}</text>' if content else ""


def _drawn(box: Box, left: int = 0, top: int = 0) -> Iterator[str]:
    if box.tile is not None:
        yield _tile(box, box.tile, left, top)
        return
    if box.kind != "node":
        css = "core" if box.kind == "core" else "group"
        inset = 2 if box.framed else 0
        width, height = box.width * COLUMN - 2 * inset, box.height * ROW - 2 * inset
        yield (
            f'<rect class="{css}" rx="4" x="{left * COLUMN + inset:.1f}" y="{top * ROW + inset}" '
            f'width="{width:.1f}" height="{height}"/>'
        )
        yield text(left + 1, top + 0.1, box.title, "title" if css == "group" else "faint")
    for child in box.children:
        yield from _drawn(child, left + box.inset + child.x, top + box.inset + child.y)


def _tile(box: Box, tile: Tile, left: int, top: int) -> str:
    width, height = box.width * COLUMN - 2, box.height * ROW - 2
    pitch = 1.0 if box.framed else 0.87
    lines = [text(1.7, 0, box.title, "title")] if box.framed else []
    for n, line in enumerate(box.lines):
        last = n == len(box.lines) - 1
        wrong = (tile.problems or tile.foreign) and (last if box.framed else n == 0)
        lines.append(text(1.7, (n + box.inset) * pitch, line, "bad" if wrong else ""))
    if box.framed and tile.foreign:
        share = min(1.0, tile.foreign) * (width - COLUMN - 8)
        lines.append(
            f'<rect class="time" x="{COLUMN + 4:.1f}" y="{height - 12}" width="{max(2, share):.1f}"'
            f' height="7"/>'
        )
    return (
        f'<svg class="{_classes(tile)}" data-cpu="{tile.number}" x="{left * COLUMN + 1:.1f}" '
        f'y="{top * ROW + 1}" width="{width:.1f}" height="{height}">'
        f"<title>{escape(details(tile))}</title>"
        f"{_field(tile.use, width, height)}{''.join(lines)}</svg>"
    )


def _classes(tile: Tile) -> str:
    names = ["tile", tile.use.value, owner_class(tile.colour)]
    return " ".join([*names, *(["problem"] if tile.problems else [])])


def _field(use: Use, width: float, height: float) -> str:
    """Return the ground of a tile: edge, strip at its left, and the strip's pattern."""
    parts = [
        f'<rect class="edge" x="1.5" y="1.5" width="{width - 3:.1f}" height="{height - 3:.1f}"/>'
    ]
    strip = f'x="2.5" y="2.5" width="{COLUMN:.1f}" height="{height - 5:.1f}"'
    if use is Use.OFFLINE:
        parts.append(f'<path class="edge" d="M2 2L{width - 2:.1f} {height - 2:.1f}"/>')
    elif use is not Use.FREE:
        parts.append(f'<rect class="strip" {strip}/>')
    if use in {Use.SHARED, Use.RESERVED, Use.HOUSEKEEPING}:
        parts.append(f'<rect fill="url(#{use.value})" {strip}/>')
    return "".join(parts)


def details(tile: Tile) -> str:
    """Return everything about a pCPU in one text, of bounded length."""
    parts = [f"pCPU {tile.number}: {tile.use.value}"]
    parts += [", ".join(one.name for one in tile.owners)] if tile.owners else []
    parts += [tile.threads] if tile.threads else []
    parts += [", ".join(tile.marks)] if tile.marks else []
    parts += [f"foreign tasks ran {percent(tile)} of the time"] if tile.foreign else []
    parts += [f"{one.kind}: {safe(one.text)}" for one in tile.problems]
    return cut("\n".join(parts), MAX_DETAILS, _OUTPUT)


def _signs(found: Picture) -> Iterator[str]:
    """Yield a row per use that occurs."""
    for use, cpus, meaning in found.legend():
        words = f"{use.value}: {meaning} ({len(cpus)})"
        yield _swatch(use.value, "plain", use) + text(5, 0, words)


def _swatch(css: str, owner: str, use: Use) -> str:
    return (
        f'<svg class="{css} {owner}" width="{4 * COLUMN:.1f}" height="{ROW - 1}">'
        f"{_field(use, 4 * COLUMN, ROW - 1)}</svg>"
    )


def _owners(found: Picture, columns: int) -> Iterator[str]:
    """Yield rows of owners, as many beside each other as there is room for."""
    entries: list[tuple[str, int | None, str]] = [
        (one.key, one.colour, one.name) for one in found.owners
    ]
    if any(one.key == SEVERAL for one in found.tiles):
        entries.append((SEVERAL, None, "several of them"))
    each = columns // ENTRY
    rows = -(-len(entries) // each)
    for n in range(rows):
        row = []
        for place, (key, colour, name) in enumerate(entries[n::rows]):
            words = f"{key} {shortened(name, ENTRY - 7 - len(key), _OUTPUT)}"
            field = _swatch("exclusive", owner_class(colour), Use.EXCLUSIVE)
            x = place * ENTRY * COLUMN
            row.append(f'<g transform="translate({x:.1f} 0)">{field}{text(5, 0, words)}</g>')
        yield "".join(row)


def _wrong(found: Picture, columns: int) -> Iterator[str]:
    problems = list(found.wrong)
    if problems[MAX_PROBLEMS:]:
        more = count(len(problems) - MAX_PROBLEMS, "more finding")
        problems[MAX_PROBLEMS:] = [f"! {more}: kata-pin check"]
    for one in problems:
        yield text(0, 0, cut(one, columns, _OUTPUT), "bad")
    for one in found.notes:
        yield text(0, 0, cut(one, columns, _OUTPUT), "faint")
