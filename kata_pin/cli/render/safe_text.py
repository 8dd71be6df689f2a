"""Texts that others chose, made fit for a terminal.

Pod names, thread names, paths and error texts may hold escape sequences, newlines, direction
marks or rich's markup. Nothing here is ever parsed as markup: lines are rich.Text objects, and what
is not printable is shown as its escape.
"""

from __future__ import annotations

from rich.text import Text

from kata_pin.cli.reports.words import safe


def styled(text: str, style: str = "") -> Text:
    """Return foreign or own text as a Text in one style; no markup is read in it."""
    return Text(safe(text), style=style)
