"""Wrapping and tables: nothing is lost, cpu lists break after commas only."""

import re

from hypothesis import given
from hypothesis import strategies as st

from kata_pin.base.cpuset import CpuSet
from kata_pin.cli.render.layout import CPUS, NAMES, WORDS, Column, Output, Text, table, wrap
from kata_pin.cli.reports.words import safe

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
    lines = table(columns, cells, Output(width))
    assert [line.plain for line in lines if line.cell_len > width] == []
    shown = set(re.findall(r"[0-9]+(?:-[0-9]+)?", " ".join(line.plain for line in lines)))
    for _, cpus, _ in rows:
        assert set(cpus.split(",")) <= shown
