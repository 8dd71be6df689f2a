"""A line of text is drawn as rich draws one that was made in the same way."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.cells import cell_len as rich_cell_len
from rich.console import Console
from rich.text import Text as RichText

from kata_pin.cli.render.layout import Text, cell_len


def drawn(text: RichText) -> str:
    """Return what rich writes to a terminal."""
    console = Console(file=StringIO(), force_terminal=True, color_system="256", width=200)
    console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def padded(kind: Any) -> Any:
    """Padding takes the style of the cell that it follows, which a background shows."""
    return kind("a", style="color(16) on color(117)") + kind("   ") + kind("b", style="red")


def cut(kind: Any) -> Any:
    """A part of several styles."""
    return (kind("abc ", style="bold") + kind("def", style="dim") + kind(" ghi"))[2:9]


def joined(kind: Any) -> Any:
    """Groups with a separator in a style of its own."""
    parts = [kind("x", style="red"), kind(""), kind("y") + kind("z", style="dim")]
    return kind("; ", style="bold").join(parts)


def stripped(kind: Any) -> Any:
    """White space at the end goes with its style."""
    text = kind("a ", style="bold").append("b", "red").append("  ", "on blue")
    text.rstrip()
    return text


@pytest.mark.parametrize("make", [padded, cut, joined, stripped])
def test_lines_look_as_rich_makes_them(make: Any) -> None:
    """Colours and letters are the same."""
    ours: Text = make(Text)
    assert drawn(ours.for_rich()) == drawn(make(RichText))
    assert "\x1b[" in drawn(ours.for_rich())


@pytest.mark.parametrize(
    "text",
    ["", "plain", "0→6-7 1..4×2 · ─", "生é🚀", "e\u0301", "\u200b", "\x1b"],  # noqa: RUF001
)
def test_widths_are_those_of_rich(text: str) -> None:
    """Signs of our own are measured without rich's table."""
    assert cell_len(text) == Text(text).cell_len == rich_cell_len(text)
