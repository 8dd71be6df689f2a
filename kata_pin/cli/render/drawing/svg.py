"""`draw --svg`: the boxes as SVG, with the legend below them.

One self-contained file: no script, no font, no link. Names come from pods: every text is printable
(words.safe), cut to its place, and escaped; a tile clips what is drawn in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from kata_pin.cli.render.drawing import theme
from kata_pin.cli.render.drawing.boxes import Box, Choice, Detail, cut, fitted, shortened
from kata_pin.cli.render.drawing.picture import (
    MAX_NAME,
    MEANING,
    SEVERAL,
    Picture,
    Tile,
    Use,
    percent,
    picture,
)
from kata_pin.cli.render.layout import Output
from kata_pin.cli.reports.foreign import NOTHING, Looked
from kata_pin.cli.reports.words import safe
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.reports.state import State

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
    return _stacked(
        title, columns, [f"<style>{theme.style()}</style>{PATTERNS}{heading}"], box, below
    )


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
    names = ["tile", tile.use.value, theme.owner_class(tile.colour)]
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
    for use in Use:
        cpus = CpuSet(one.number for one in found.tiles if one.use is use)
        if cpus:
            words = f"{use.value}: {MEANING[use]} ({len(cpus)})"
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
            field = _swatch("exclusive", theme.owner_class(colour), Use.EXCLUSIVE)
            x = place * ENTRY * COLUMN
            row.append(f'<g transform="translate({x:.1f} 0)">{field}{text(5, 0, words)}</g>')
        yield "".join(row)


def _wrong(found: Picture, columns: int) -> Iterator[str]:
    told = list(found.wrong)
    if told[MAX_PROBLEMS:]:
        more = count(len(told) - MAX_PROBLEMS, "more finding")
        told[MAX_PROBLEMS:] = [f"! {more}: kata-pin check"]
    for one in told:
        yield text(0, 0, cut(one, columns, _OUTPUT), "bad")
    for one in found.notes:
        yield text(0, 0, cut(one, columns, _OUTPUT), "faint")
