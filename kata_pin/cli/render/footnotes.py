"""Texts of a table's rows that are said once below the table instead of in every row. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from kata_pin.cli.render.layout import Column, Output, Row, fits, paragraph, styled, table
from kata_pin.cli.render.phrases import DIM

Rows = Callable[[Sequence[Text]], Sequence[Row]]
"""Makes a table's rows from the cells of the column with the texts, one per row."""


def table_with_footnotes(
    columns: Sequence[Column], rows: Rows, texts: Sequence[str], output: Output
) -> list[Text]:
    """Return a table and its footnotes, such as `[1] shared CPUs`.

    A text of several rows is a footnote; so is every other one where the table had to break cells.
    """
    again = {text for text in texts if text and texts.count(text) > 1}
    made = rows(_cells(texts, _numbered(texts, again)))
    if not fits(columns, made, output):
        again = {text for text in texts if text}
        made = rows(_cells(texts, _numbered(texts, again)))
    lines = table(columns, made, output)
    for text, number in _numbered(texts, again).items():
        lines += paragraph(styled(f"[{number}] {text}", DIM), output, indent=4)
    return lines


def _numbered(texts: Sequence[str], chosen: set[str]) -> dict[str, int]:
    """Return the numbers of the chosen texts, in the order of the rows."""
    found = dict.fromkeys(text for text in texts if text in chosen)
    return {text: number for number, text in enumerate(found, 1)}


def _cells(texts: Sequence[str], numbers: dict[str, int]) -> list[Text]:
    return [styled(f"[{numbers[text]}]" if text in numbers else text, DIM) for text in texts]
