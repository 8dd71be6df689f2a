"""Wrapping and tables: nothing is lost, cpu lists break after commas only."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from kata_pin.cli.render.layout import (
    CPUS,
    NAMES,
    NO_LIMIT,
    WORDS,
    Column,
    Look,
    facts,
    table,
    wrap,
)
from kata_pin.cli.render.safe_text import safe
from kata_pin.model.cpuset import CpuSet

cpu_lists = st.sets(st.integers(0, 8191), min_size=1, max_size=60).map(lambda s: str(CpuSet(s)))
words = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), max_size=40)
sentences = st.lists(words, max_size=8).map(" ".join)
some_rows = st.tuples(words, cpu_lists, sentences)


@given(cpu_lists, st.integers(12, 60))
def test_cpu_lists_break_after_commas_only(cpus: str, width: int) -> None:
    """Each line of a wrapped cpu list is whole elements; together they are the list."""
    lines = [line.plain for line in wrap(Text(cpus), width, CPUS)]
    assert "".join(lines) == cpus
    assert all(line.endswith(",") for line in lines[:-1])
    assert all(len(line) <= width for line in lines)


@given(sentences, st.integers(2, 60), st.sampled_from([WORDS, NAMES, CPUS, ""]))
def test_wrapping_loses_no_character(text: str, width: int, breaks: str) -> None:
    """Apart from spaces at line ends every character is still there, in order, and fits."""
    lines = wrap(Text(text), width, breaks)
    assert "".join("".join(line.plain for line in lines).split()) == "".join(text.split())
    assert all(line.cell_len <= width for line in lines)


@given(st.lists(some_rows, min_size=1, max_size=6), st.integers(30, 200))
def test_tables_fit_and_lose_nothing(rows: list[tuple[str, str, str]], width: int) -> None:
    """Whatever is in it, a table fits its width and shows every element of every cpu list."""
    columns = [
        Column("NAME", NAMES, fold=8),
        Column("CPUS", CPUS),
        Column("WHY", fold=6, comfort=20),
    ]
    cells = [[Text(safe(cell)) for cell in row] for row in rows]
    lines = table(columns, cells, Look(width))
    assert [line.plain for line in lines if line.cell_len > width] == []
    shown = set(re.findall(r"[0-9]+(?:-[0-9]+)?", " ".join(line.plain for line in lines)))
    for _, cpus, _ in rows:
        assert set(cpus.split(",")) <= shown


def test_columns_are_left_out_by_name() -> None:
    """An optional column that does not fit is named below the table."""
    columns = [Column("A"), Column("LONG", optional=True), Column("WHY", comfort=20)]
    rows = [[Text("a"), Text("x" * 30), Text("because of this and of that")]]
    narrow = [line.plain for line in table(columns, rows, Look(40))]
    assert narrow[-1] == "not shown at this width: LONG"
    assert not any("xxx" in line for line in narrow)
    wide = [line.plain for line in table(columns, rows, Look(120))]
    assert "x" * 30 in wide[1]
    assert len(wide) == 2


def test_rows_become_blocks_when_nothing_else_fits() -> None:
    """A table narrower than its unbreakable cells shows every cell below the other."""
    columns = [Column("POD"), Column("MASK", CPUS), Column("NOTE")]
    rows = [[Text("p"), Text("1000-1003,2000-2003"), Text("")], [Text("q"), Text("1"), Text("ok")]]
    lines = [line.plain for line in table(columns, rows, Look(16))]
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
    lines = table([Column("A"), Column("CPUS", CPUS)], [[Text("a"), Text(cpus)]], Look(NO_LIMIT))
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
    lines = facts([("pod", Text("a/b")), ("handler", Text(""))], Look(80))
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
