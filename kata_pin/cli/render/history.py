"""`history` as lines of text."""

from __future__ import annotations

from rich.text import Text

from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, styled, table
from kata_pin.cli.reports import words
from kata_pin.model.reports.history import Change, HistoryDocument


def history(document: HistoryDocument, output: Output) -> list[Text]:
    """Return one row per change."""
    if not document.changes:
        return [Text("no changes recorded")]
    columns = [
        Column("TIME"),
        Column("SANDBOX", NAMES, fold=12, comfort=20),
        Column("STATE"),
        Column("MASK", CPUS),
        Column("MOVED", right=True),
        Column("LATENCY", right=True),
        Column("TRIGGER", ", :", fold=16, comfort=20),
    ]
    return table(columns, [_row(change, output) for change in document.changes], output)


def _row(change: Change, output: Output) -> list[Text]:
    name = change.sandbox[:12] if change.pod == change.sandbox else change.pod
    moved = f"{change.moved} of {change.threads}" if change.threads else words.NOTHING
    return [
        Text(change.time.replace("T", " ").removesuffix("Z")),
        styled(name, phrases.NAME),
        styled(
            _turned(change.previous_state, change.state, output),
            phrases.STATE_STYLES.get(change.state, ""),
        ),
        styled(_turned(change.previous_mask, change.mask, output)),
        Text(moved),
        Text(_milliseconds(change.latency_ms)),
        styled(", ".join(change.triggers) or words.NOTHING),
    ]


def _turned(before: str | None, after: str | None, output: Output) -> str:
    """Return a value, with the one before where that was another."""
    now = after or words.NOTHING
    return now if before in {after, "", None} else f"{before}{output.arrow}{now}"


def _milliseconds(taken: float) -> str:
    return f"{taken:.1f} ms" if taken < 1000 else words.age(taken / 1000)
