"""`draw --html`: one page with the picture, what is wrong, the owners and a row per pCPU.

Self-contained: no script and no link, and a policy that forbids the browser to load anything, so
that a name from a pod could do nothing even if it were not escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final

from kata_pin.cli.render import phrases
from kata_pin.cli.render.drawing import svg, theme
from kata_pin.cli.render.drawing.boxes import cut
from kata_pin.cli.render.drawing.picture import Picture, Tile, percent, picture
from kata_pin.cli.render.layout import NO_LIMIT, Output
from kata_pin.cli.reports.foreign import NOTHING, Looked
from kata_pin.cli.reports.words import safe
from kata_pin.model.reports.state import State

OUTPUT: Final = Output(NO_LIMIT)

MAX_CELL: Final = 600
"""Characters of a table's cell."""

SHORT: Final = 16
"""Characters of a text that is kept on one line."""

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
        f"<title>{name}</title><style>{theme.style()}{theme.page_style()}</style></head>"
        f'<body><svg width="0" height="0" aria-hidden="true">{svg.PATTERNS}</svg>'
        f"<h1>{name}</h1>\n" + "\n".join(parts) + "</body></html>\n"
    )


def paragraph(text: str, css: str = "") -> str:
    """Return a paragraph of a text."""
    return f'<p class="{css}">{_cell(text)}</p>' if css else f"<p>{_cell(text)}</p>"


def figure(picture: str) -> str:
    """Return a picture that scrolls by itself where the window is narrower."""
    return f'<div class="wide" tabindex="0">{picture}</div>'


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 0) -> str:
    """Return a table of texts; the first `names` cells of a row are its headings."""
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in titles)
    body = []
    for row in rows:
        first = "".join(f'<th scope="row">{_cell(one)}</th>' for one in row[:names])
        body.append(f"<tr>{first}{''.join(f'<td>{_cell(one)}</td>' for one in row[names:])}</tr>")
    return (
        '<div class="wide" tabindex="0"><table><thead><tr>'
        f"{head}</tr></thead><tbody>\n" + "\n".join(body) + "\n</tbody></table></div>"
    )


def _cell(text: str) -> str:
    shown = escape(cut(safe(text), MAX_CELL, OUTPUT))
    return f'<bdi class="short">{shown}</bdi>' if len(text) <= SHORT else f"<bdi>{shown}</bdi>"


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
