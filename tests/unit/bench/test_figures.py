"""What the benchmark makes of its samples."""

from __future__ import annotations

import json

import pytest

from tests.bench.figures import (
    Row,
    Samples,
    in_turns,
    interpreter_mib,
    loop_ms,
    markdown,
    median_row,
    tail_row,
    with_floor,
)


def test_percentiles() -> None:
    """A percentile is a sample that so many percent are not above; the median the middle."""
    samples = Samples([number / 1000 for number in range(1, 101)])
    assert samples.percentile(99) == pytest.approx(0.099)
    assert samples.percentile(90) == pytest.approx(0.090)
    assert samples.median == pytest.approx(0.0505)
    assert Samples([0.5]).percentile(99) == 0.5


@pytest.mark.parametrize(("bar", "held"), [(2.0, True), (1.9, False), (None, None)])
def test_bar_on_the_ratio(bar: float | None, held: bool | None) -> None:
    """A bar on the ratio holds up to and including it."""
    row = median_row("x", Samples([0.004]), Samples([0.002]), bar=bar)
    assert (row.value, row.floor, row.ratio, row.held) == (4.0, 2.0, 2.0, held)


@pytest.mark.parametrize(("bar", "held"), [(5.0, True), (4.9, False)])
def test_bar_on_the_tail(bar: float, held: bool) -> None:
    """A bar in milliseconds is on the p99."""
    row = tail_row("x", Samples([0.001] * 98 + [0.005] * 2), Samples([0.001] * 100), bar_ms=bar)
    assert (row.value, row.held) == (5.0, held)


def test_json_has_the_agreed_members() -> None:
    """A row as JSON has name, value, unit, floor, ratio and n."""
    row = json.loads(Row("x", 1.23456, "ms", 7, floor=1.0, ratio=1.23456).as_json())
    agreed = {name: row[name] for name in ("name", "value", "unit", "floor", "ratio", "n")}
    assert agreed == {
        "name": "x", "value": 1.2346, "unit": "ms", "floor": 1.0, "ratio": 1.2346, "n": 7,
    }  # fmt: skip


@pytest.mark.parametrize(("value", "shown"), [(1114156, "1114156"), (2.0, "2.00"), (0, "0")])
def test_counts_have_no_decimals(value: float, shown: str) -> None:
    """A number of records is printed as one."""
    assert f"| x |  | {shown} records |" in markdown([Row("x", value, "records", 1)])


def test_turns_alternate() -> None:
    """Each round takes one sample of every measure, in their order."""
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return 1.0

    in_turns(2, lambda: measure("floor"), lambda: measure("work"))
    assert calls == ["floor", "work", "floor", "work"]


@pytest.mark.parametrize(
    ("unit", "floor"),
    [("ms", 2.0), ("ms CPU", 2.0), ("% of a core", 0.2), ("MiB", 8.0), ("threads", None)],
)
def test_rows_without_a_floor_get_one_of_the_same_run(unit: str, floor: float | None) -> None:
    """The bar is on the value as before; a count has no floor."""
    row = with_floor(Row("x", 4.0, unit, 1, bar=5.0, bar_on_ratio=False), 2.0, 8.0)
    assert row.floor == floor
    assert row.ratio == (None if floor is None else 4.0 / floor)
    assert row.held


def test_a_floor_of_its_own_stays() -> None:
    """The least that the same thing can cost says more than a loop."""
    row = Row("x", 4.0, "ms", 1, floor=1.0, ratio=4.0)
    assert with_floor(row, 2.0, 8.0) == row


def test_floors_are_measured() -> None:
    """A loop takes some time, and an interpreter some memory."""
    assert 0 < loop_ms() < 1000
    assert 2 < interpreter_mib() < 100


def test_markdown_is_the_table_of_the_document() -> None:
    """Columns are name, floor, value, ratio, bar and whether it held; what is missing is empty."""
    rows = [median_row("a", Samples([0.004]), Samples([0.002]), bar=1.5), Row("b", 3.0, "MiB", 1)]
    head, line, first, second = markdown(rows).splitlines()
    assert head.count("|") == line.count("|") == first.count("|") == second.count("|")
    assert first == "| a | 2.00 | 4.00 ms | 2.00 x | <= 1.5 x | MISSED |"
    assert second == "| b |  | 3.00 MiB |  |  |  |"
