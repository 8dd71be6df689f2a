"""`kata-pin draw`, and the picture on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from typing import Final

import click

from kata_pin.base.documents.state import State
from kata_pin.cli.options import global_options, measured_for
from kata_pin.cli.render import phrases, screen
from kata_pin.cli.render.layout import (
    CPUS,
    NAMES,
    Column,
    Output,
    Text,
    cell_len,
    facts,
    paragraph,
    styled,
    table,
)
from kata_pin.cli.reports.findings import NOTHING, Looked
from kata_pin.cli.session import Session
from kata_pin.options.pictures.picture import SEVERAL, Box, Picture, Tile, Use, fitted, picture

# `kata-pin draw`: read-only.


@click.command()
@click.option("--svg", metavar="FILE", type=click.Path(), help="Write an SVG picture; - is stdout.")
@click.option("--html", metavar="FILE", type=click.Path(), help="Write an HTML page; - is stdout.")
@measured_for
@global_options
@click.pass_obj
def draw(session: Session, *, svg: str | None, html: str | None, seconds: int | None) -> None:
    """Draw this node: each pCPU with its owner and what runs there.

    Packages, NUMA nodes, last-level caches and cores as boxes; in them each pCPU with the key of
    its owner and its threads' roles, exclusive, shared, reserved, housekeeping, free and offline
    ones by sign and border. `!` marks findings of check; a percentage is the foreign tasks' share
    of an exclusive pCPU during the measurement. --svg and --html write a self-contained file
    instead.
    """
    state = session.connect().state()
    if session.json:
        screen.document(state)
        return
    from kata_pin.cli.reports import prove
    from kata_pin.cli.reports.prove import ProofRequest

    limits = session.config.isolation
    span = limits.check_s if seconds is None else seconds
    looked = prove.look(
        state, session.connect().state, ProofRequest(None, span, limits.max_foreign)
    )
    if svg is None and html is None:
        screen.show(picture_lines(state, screen.output(), looked))
    for file, renderer in ((svg, "svg"), (html, "page")):
        if file is not None:
            module = import_module(f"kata_pin.options.pictures.{renderer}")
            screen.write(file, module.document(state, looked))


# `draw` on a terminal: the boxes as characters, the signs, the owners, and what is wrong.

WIDEST: Final = 200
"""Columns that are used of a wider output, a pipe for instance."""

_SIGNS: Final = {
    Use.EXCLUSIVE: ("█", "#"),
    Use.SHARED: ("░", "."),
    Use.RESERVED: ("+", "+"),
    Use.HOUSEKEEPING: ("h", "h"),
    Use.FREE: ("-", "-"),
    Use.OFFLINE: ("x", "x"),
}
"""The signs of `pools`, but for exclusive pCPUs, whose letter has a place of its own here."""

_EDGES: Final = {
    Use.EXCLUSIVE: ("╔═╗║╚╝", "#=####"),
    Use.SHARED: ("┌─┐│└┘", "+-+|++"),
    Use.RESERVED: ("┏━┓┃┗┛", "+=+|++"),
    Use.HOUSEKEEPING: ("┌╌┐╎└┘", "h-h|hh"),
    Use.FREE: ("┌┈┐┊└┘", "......"),
    Use.OFFLINE: ("×┈×┊××", "x.x.xx"),  # noqa: RUF001 - the sign is meant
}
"""The corners and sides of a tile: top left, top, top right, side, bottom left, bottom right."""

_GROUP: Final = ("┌─┐│└┘", "+-+|++")
_OWNERS: Final = (117, 215, 114, 183, 222, 218, 80, 180)
"""Light colours of the 256 that terminals have: black can be read on each, in both themes."""

Cell = tuple[str, str]


def picture_lines(state: State, output: Output, looked: Looked = NOTHING) -> list[Text]:
    """Return the node's boxes, what signs and keys stand for, and what is wrong."""
    found = picture(state, output, looked)
    narrow = Output(min(output.width, WIDEST), output.unicode)
    lines = [*phrases.head(state, output), Text(), *drawn(fitted(found, narrow), narrow), Text()]
    lines += [*_signs(found, output), Text(), *_owners(found, output)]
    return [*lines, *_wrong(found, output)]


def drawn(box: Box, output: Output) -> list[Text]:
    """Return a box and all in it as lines."""
    grid: list[list[Cell]] = [[(" ", "")] * box.width for _ in range(box.height)]
    _paint(grid, box, 0, 0, output)
    lines = []
    for row in grid:
        line = Text()
        for style, cells in groupby(row, itemgetter(1)):  # a style is switched on once
            line.append("".join(character for character, _ in cells), style)
        line.rstrip()
        lines.append(line)
    return lines


def _paint(grid: list[list[Cell]], box: Box, left: int, top: int, output: Output) -> None:
    tile = box.tile
    style = _style(tile) if tile else ""
    if tile:
        for y in range(top, top + box.height):
            _write(grid, left, y, " " * box.width, style)
    if box.framed:
        edges = (_EDGES[tile.use] if tile else _GROUP)[not output.unicode]
        _frame(grid, (left, top, box.width, box.height), edges, style if tile else phrases.DIM)
        _write(grid, left + 2, top, f" {box.title} ", style or "bold")
    for n, line in enumerate(box.lines):
        _write(grid, left + 1, top + n + box.inset, line, style)
        if tile and not box.framed:
            sign = _SIGNS[tile.use][not output.unicode]
            _write(grid, left, top + n, sign, "" if tile.use is Use.EXCLUSIVE else style)
    for child in box.children:
        _paint(grid, child, left + box.inset + child.x, top + box.inset + child.y, output)


def _frame(
    grid: list[list[Cell]], place: tuple[int, int, int, int], edges: str, style: str
) -> None:
    left, top, width, height = place
    across = edges[1] * (width - 2)
    bottom = top + height - 1
    _write(grid, left, top, f"{edges[0]}{across}{edges[2]}", style)
    _write(grid, left, bottom, f"{edges[4]}{across}{edges[5]}", style)
    for y in range(top + 1, bottom):
        _write(grid, left, y, edges[3], style)
        _write(grid, left + width - 1, y, edges[3], style)


def _write(grid: list[list[Cell]], x: int, y: int, text: str, style: str) -> None:
    """Put a text on the grid; a wide character takes two cells, one without width joins another."""
    for character in text:
        width = cell_len(character)
        if width == 0:
            before, look = grid[y][x - 1]
            grid[y][x - 1] = (before + character, look)
            continue
        grid[y][x : x + width] = [(character, style), *[("", style)] * (width - 1)]
        x += width


def _style(tile: Tile) -> str:
    if tile.problems or tile.foreign:
        return phrases.BAD
    if tile.use in {Use.FREE, Use.OFFLINE}:
        return phrases.DIM
    return _owner_style(tile.colour) if tile.use is Use.EXCLUSIVE else ""


def _owner_style(colour: int | None) -> str:
    return "" if colour is None else f"color(16) on color({_OWNERS[colour % len(_OWNERS)]})"


def _signs(found: Picture, output: Output) -> list[Text]:
    signs = []
    for use, cpus, meaning in found.legend():
        sign = _SIGNS[use][not output.unicode]
        signs.append((f"{sign} {use.value}", Text(f"{cpus}  ({len(cpus)}, {meaning})")))
    return facts(signs, output)


def _owners(found: Picture, output: Output) -> list[Text]:
    columns = [
        Column("KEY"),
        Column("OWNER", NAMES, fold=24),
        Column("EXCLUSIVE", CPUS),
        Column("SHARED", CPUS),
    ]
    rows = [
        [
            styled(one.key, _owner_style(one.colour)),
            styled(one.name),
            phrases.cpus(str(one.exclusive)),
            phrases.cpus(str(one.shared)),
        ]
        for one in found.owners
    ]
    if any(one.key == SEVERAL for one in found.tiles):
        rows.append([styled(SEVERAL, phrases.NAME), Text("several of them"), Text(), Text()])
    return table(columns, rows, output) if rows else [Text("no pCPU has an owner")]


def _wrong(found: Picture, output: Output) -> Iterator[Text]:
    """Yield what the flags on the tiles mean here, and how that was measured."""
    for one in found.wrong:
        yield from paragraph(styled(one, phrases.BAD), output, indent=2)
    for one in found.notes:
        yield from paragraph(styled(one, phrases.DIM), output)
