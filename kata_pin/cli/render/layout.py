"""Lines and tables of text that fit a width without hiding anything.

They need no import of rich until they are printed in colour.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from msgspec import Struct

from kata_pin.cli.reports.words import safe

if TYPE_CHECKING:
    from rich.text import Text as RichText


# A line of text whose parts have styles, without what rich needs to be imported.
#
# rich draws colours on terminals, and only there it is imported: it would double the time of a
# command whose output is a pipe. Styles are those of rich, such as `bold red`.

_SIGNS: Final = str.maketrans("→×·─╳", "-----")  # noqa: RUF001 - what we print
"""Signs of our own that fill one column."""


class Span(NamedTuple):
    """A part of a text, from `start` up to and without `end`, that has a style."""

    start: int
    end: int
    style: str


class Text:
    """One line of text; `style` is that of all of it, and spans have more. It can be changed.

    What is added to a text, padding for instance, takes its style too, as in rich.
    """

    __slots__ = ("plain", "spans", "style")

    def __init__(self, plain: str = "", style: str = "", spans: Iterable[Span] = ()) -> None:
        self.plain = plain
        self.style = style
        self.spans = list(spans)

    def __add__(self, other: Text) -> Text:
        """Return both, one after the other."""
        return Text(self.plain, self.style, self.spans).append_text(other)

    def __getitem__(self, part: slice) -> Text:
        """Return the part of a slice without a step."""
        start, end, _ = part.indices(len(self.plain))
        spans = (
            Span(max(span.start, start) - start, min(span.end, end) - start, span.style)
            for span in self.spans
            if span.start < end and span.end > start
        )
        return Text(self.plain[start:end], self.style, spans)

    @property
    def cell_len(self) -> int:
        """How many columns of a terminal it fills."""
        return cell_len(self.plain)

    def append(self, plain: str, style: str = "") -> Self:
        """Add a text in one style to the end."""
        return self.append_text(Text(plain, style))

    def append_text(self, other: Text) -> Self:
        """Add another text to the end."""
        start = len(self.plain)
        self.plain += other.plain
        if other.style:
            self.spans.append(Span(start, len(self.plain), other.style))
        if other.spans:
            self.spans += [Span(s + start, e + start, style) for s, e, style in other.spans]
        return self

    def rstrip(self) -> None:
        """Remove white space from the end."""
        length = len(self.plain.rstrip())
        if length < len(self.plain):
            kept = self[:length]
            self.plain, self.spans = kept.plain, kept.spans

    def join(self, parts: Iterable[Text]) -> Text:
        """Return the parts with this text between them."""
        joined = Text(style=self.style)
        for number, part in enumerate(parts):
            if number:
                joined.append_text(self)
            joined.append_text(part)
        return joined

    def for_rich(self) -> RichText:
        """Return it as rich prints it."""
        from rich.text import Span as RichSpan
        from rich.text import Text as RichText

        return RichText(self.plain, self.style, spans=[RichSpan(*span) for span in self.spans])


def cell_len(text: str) -> int:
    """Return how many columns of a terminal a text fills: an East Asian character fills two."""
    if (text if text.isascii() else text.translate(_SIGNS)).isascii() and text.isprintable():
        return len(text)
    from rich.cells import cell_len as measured

    return measured(text)


# A cell that is too wide is wrapped where its column allows (a cpu list only after a comma, so that
# `12-15` never becomes `1` and `2-15`); if even that does not fit, each row becomes a block of
# lines. Nothing is cut. rich.table does neither: it wraps at spaces, folds or crops what is longer,
# and its import adds 15 ms to a command. Pure: a table becomes a list of lines.

GAP: Final = 2
"""Columns between two columns of a table."""

NO_LIMIT: Final = 1_000_000
"""Width of an output that is no terminal: lines stay whole, for grep."""

WORDS: Final = " "
NAMES: Final = " -/._"
CPUS: Final = ", "


class Output(Struct, frozen=True):
    """What the output can show: its width, and whether it can encode more than ASCII."""

    width: int = 80
    unicode: bool = True

    @property
    def arrow(self) -> str:
        """Between a vCPU and its pCPU."""
        return "→" if self.unicode else "->"

    @property
    def dot(self) -> str:
        """Between facts on one line."""
        return " · " if self.unicode else " | "

    @property
    def times(self) -> str:
        """Before a count."""
        return "×" if self.unicode else "x"  # noqa: RUF001 - the sign is meant


class Column(Struct, frozen=True):
    """A column: its title, after which characters a cell may be broken, its side.

    A piece between two breaks that is longer than `fold` is cut at that width all the same; 0
    never cuts. `comfort` is a width below which optional columns are rather left out of the table,
    which then says so: those with the greatest `optional` first, those with 0 never.
    """

    title: str
    breaks: str = WORDS
    right: bool = False
    fold: int = 0
    comfort: int = 0
    optional: int = 0


Row = Sequence[Text]


def table(columns: Sequence[Column], rows: Sequence[Row], output: Output) -> list[Text]:
    """Return the lines of a table; each row has one cell a column."""
    places = range(len(columns))
    droppable = sorted(
        (n for n in places if columns[n].optional), key=lambda n: (-columns[n].optional, -n)
    )
    last = len(droppable)
    for dropped, comfortable in (*((n, True) for n in range(last + 1)), (last, False)):
        kept = [n for n in places if n not in droppable[:dropped]]
        fewer = [columns[n] for n in kept]
        short = [[row[n] for n in kept] for row in rows]
        widths = _widths(fewer, short, output.width, comfortable=comfortable)
        if widths is not None:
            left_out = ", ".join(columns[n].title for n in sorted(droppable[:dropped]))
            remark = Text(f"not shown at this width: {left_out}", style="dim")
            told = paragraph(remark, output) if left_out else []
            return _laid_out(fewer, short, widths) + told
    return list(_blocks(columns, rows, output))


def fits(columns: Sequence[Column], rows: Sequence[Row], output: Output) -> bool:
    """Return whether a table has room for every column without breaking a cell."""
    widths = [_natural(column, rows, n) for n, column in enumerate(columns)]
    return sum(widths) + GAP * (len(columns) - 1) <= output.width


def _laid_out(columns: Sequence[Column], rows: Sequence[Row], widths: Sequence[int]) -> list[Text]:
    titles = [Text(column.title, style="bold") for column in columns]
    lines = _row_lines(columns, titles, widths)
    for row in rows:
        lines += _row_lines(columns, row, widths)
    return lines


def styled(text: str, style: str = "") -> Text:
    """Return foreign or own text as a Text in one style, fit for a terminal.

    Pod names, thread names, paths and error texts may hold escape sequences, newlines, direction
    marks or rich's markup. No markup is read in them; what is not printable is shown escaped.
    """
    return Text(safe(text), style=style)


def facts(pairs: Iterable[tuple[str, Text]], output: Output) -> list[Text]:
    """Return `name  value` lines with the values below each other, wrapped."""
    shown = [(name, value) for name, value in pairs if value.plain]
    indent = max((len(name) for name, _ in shown), default=0) + GAP
    lines: list[Text] = []
    for name, value in shown:
        first = Text(name.ljust(indent), style="bold")
        for part in wrap(value, max(16, output.width - indent), WORDS + ","):
            lines.append(first + part)
            first = Text(" " * indent)
    return lines


def paragraph(text: Text, output: Output, *, indent: int = 0) -> list[Text]:
    """Return the text's lines, broken at spaces; lines after the first are indented."""
    parts = wrap(text, max(16, output.width - indent), WORDS)
    return [parts[0], *(Text(" " * indent) + part for part in parts[1:])]


def wrap(text: Text, width: int, breaks: str) -> list[Text]:
    """Break a text into lines of at most `width` columns, after one of `breaks` where possible."""
    if text.cell_len <= width:
        return [text[: len(text.plain.rstrip())] if text.plain[-1:].isspace() else text]
    lines: list[Text] = []
    start = used = position = 0
    for piece in _pieces(text.plain, breaks):
        if used and used + cell_len(piece.rstrip(" ")) > width:
            lines.append(text[start:position])
            start, used = position, 0
        while cell_len(piece.rstrip(" ")) > width:
            count = fitting(piece, width)
            lines.append(text[position : position + count])
            position += count
            start, piece = position, piece[count:]  # noqa: PLW2901 - the rest of this very piece
        used += cell_len(piece)
        position += len(piece)
    if position > start or not lines:
        lines.append(text[start:position])
    for line in lines:
        line.rstrip()
    return lines


def _pieces(plain: str, breaks: str) -> list[str]:
    """Split a text after each run of breaking characters."""
    if not breaks:
        return [plain] if plain else []
    escaped = re.escape(breaks)
    return re.findall(f"[^{escaped}]*[{escaped}]+|[^{escaped}]+", plain)


def fitting(piece: str, width: int) -> int:
    """Return how many characters fit into the width, at least one."""
    used = 0
    for count, character in enumerate(piece):
        used += cell_len(character)
        if used > width:
            return max(1, count)
    return len(piece)


def _widths(
    columns: Sequence[Column], rows: Sequence[Row], width: int, *, comfortable: bool
) -> list[int] | None:
    """Return the columns' widths, None if the table can not fit."""
    wide = [_natural(column, rows, n) for n, column in enumerate(columns)]
    room = width - GAP * (len(columns) - 1)
    if sum(wide) <= room:
        return wide
    least = [_least(column, rows, n) for n, column in enumerate(columns)]
    if comfortable:
        least = [max(n, min(c.comfort, w)) for n, c, w in zip(least, columns, wide, strict=True)]
    if sum(least) > room:
        return None
    while sum(wide) > room:
        spare, widest = max((w, n) for n, w in enumerate(wide) if w > least[n])
        next_width = max((w for w in wide if w < spare), default=0)
        excess = sum(wide) - room
        wide[widest] = max(least[widest], min(spare - 1, max(next_width, spare - excess)))
    return wide


def _natural(column: Column, rows: Sequence[Row], n: int) -> int:
    return max([cell_len(column.title), *(cell_len(row[n].plain) for row in rows)])


def _least(column: Column, rows: Sequence[Row], n: int) -> int:
    """Return the narrowest a column can be with every cell broken only where it may be."""
    longest = max(
        (cell_len(p.rstrip(" ")) for row in rows for p in _pieces(row[n].plain, column.breaks)),
        default=0,
    )
    bounded = min(longest, column.fold) if column.fold else longest
    return max(bounded, cell_len(column.title))


def _row_lines(columns: Sequence[Column], row: Row, widths: Sequence[int]) -> list[Text]:
    """Lay the cells of one row side by side; a row is as high as its highest cell."""
    cells = [
        wrap(cell, width, column.breaks)
        for cell, width, column in zip(row, widths, columns, strict=True)
    ]
    lines = []
    for level in range(max(map(len, cells))):
        line = Text()
        for column, cell, width in zip(columns, cells, widths, strict=True):
            part = cell[level] if level < len(cell) else Text()
            padding = " " * (width - part.cell_len)
            if column.right:
                line.plain += padding
                line.append_text(part)
                line.plain += " " * GAP
            else:
                line.append_text(Text(f"{part.plain}{padding}{' ' * GAP}", part.style, part.spans))
        line.rstrip()
        lines.append(line)
    return lines


def _blocks(columns: Sequence[Column], rows: Sequence[Row], output: Output) -> Iterator[Text]:
    """Return each row as a block: its first cell, then one indented fact a column."""
    for row in rows:
        yield from wrap(Text(f"{columns[0].title} ", style="bold") + row[0], output.width, NAMES)
        indent = max(len(column.title) for column in columns[1:]) + 2 * GAP
        for column, cell in zip(columns[1:], row[1:], strict=True):
            if not cell.plain:
                continue
            first = Text(f"{' ' * GAP}{column.title}".ljust(indent), style="bold")
            for part in wrap(cell, max(12, output.width - indent), column.breaks):
                yield first + part
                first = Text(" " * indent)
