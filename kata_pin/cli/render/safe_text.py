"""Texts that others chose, made fit for a terminal.

Pod names, thread names, paths and error texts may hold escape sequences, newlines, direction
marks or rich's markup. Nothing here is ever parsed as markup: lines are rich.Text objects, and what
is not printable is shown as its escape.
"""

from __future__ import annotations

from rich.text import Text


def safe(text: str) -> str:
    r"""Return the text with everything that is not printable shown as `\x1b` or `\u202e`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def styled(text: str, style: str = "") -> Text:
    """Return foreign or own text as a Text in one style; no markup is read in it."""
    return Text(safe(text), style=style)
