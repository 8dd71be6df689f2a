"""Wrapping and tables: nothing is lost, cpu lists break after commas only."""

import pytest

from kata_pin.cli.render.layout import (
    CPUS,
    NO_LIMIT,
    WORDS,
    Column,
    Output,
    Text,
    facts,
    table,
    wrap,
)
from kata_pin.cli.reports.words import safe


def test_columns_are_left_out_by_name() -> None:
    """An optional column that does not fit is named below the table."""
    columns = [Column("A"), Column("LONG", optional=1), Column("WHY", comfort=20)]
    rows = [[Text("a"), Text("x" * 30), Text("because of this and of that")]]
    narrow = [line.plain for line in table(columns, rows, Output(40))]
    assert narrow[-1] == "not shown at this width: LONG"
    assert not any("xxx" in line for line in narrow)
    wide = [line.plain for line in table(columns, rows, Output(120))]
    assert "x" * 30 in wide[1]
    assert len(wide) == 2


def test_columns_are_left_out_one_by_one() -> None:
    """The column with the greatest number goes first; the others stay while there is room."""
    columns = [Column("A"), Column("KEPT", optional=1), Column("GONE", optional=2), Column("B")]
    rows = [[Text("a"), Text("k" * 10), Text("g" * 10), Text("b")]]
    lines = [line.plain for line in table(columns, rows, Output(20))]
    assert lines == ["A  KEPT        B", "a  kkkkkkkkkk  b", "not shown at this", "width: GONE"]


def test_rows_become_blocks_when_nothing_else_fits() -> None:
    """A table narrower than its unbreakable cells shows every cell below the other."""
    columns = [Column("POD"), Column("MASK", CPUS), Column("NOTE")]
    rows = [[Text("p"), Text("1000-1003,2000-2003"), Text("")], [Text("q"), Text("1"), Text("ok")]]
    lines = [line.plain for line in table(columns, rows, Output(16))]
    assert lines == [
        "POD p",
        "  MASK  1000-1003,",
        "        2000-2003",
        "POD q",
        "  MASK  1",
        "  NOTE  ok",
    ]


def test_a_pipe_gets_whole_lines() -> None:
    """Without a terminal no row is broken, however long."""
    cpus = ",".join(str(n) for n in range(0, 8000, 2))
    lines = table([Column("A"), Column("CPUS", CPUS)], [[Text("a"), Text(cpus)]], Output(NO_LIMIT))
    assert [line.plain for line in lines] == ["A  CPUS", f"a  {cpus}"]


def test_styles_survive_wrapping() -> None:
    """A drifting pair stays red on the second line."""
    text = Text("0→1 ") + Text("1→2!", style="red")
    lines = wrap(text, 4, WORDS)
    assert [(line.plain, [str(s.style) for s in line.spans]) for line in lines] == [
        ("0→1", []),
        ("1→2!", ["red"]),
    ]


def test_facts_skip_what_is_empty() -> None:
    """A fact without a value has no line."""
    lines = facts([("pod", Text("a/b")), ("handler", Text(""))], Output(80))
    assert [line.plain for line in lines] == ["pod  a/b"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\nb\tc\r", "a\\x0ab\\x09c\\x0d"),
        ("\x7f\x9b", "\\x7f\\x9b"),
        ("\u202edwo\u2066", "\\u202edwo\\u2066"),
        ("\u200b\ufeff\U000e0041", "\\u200b\\ufeff\\U000e0041"),
        ("\ud800", "\\ud800"),
        ("[red]é生🚀[/]", "[red]é生🚀[/]"),
    ],
)
def test_foreign_texts_are_made_visible(text: str, shown: str) -> None:
    """Control characters, directions and invisible ones are escapes; the rest stays."""
    assert safe(text) == shown
