"""What the benchmark makes of its samples."""

from __future__ import annotations

import json

import pytest

from tests.bench.figures import Row, Samples, in_turns, median_row, tail_row


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


def test_turns_alternate() -> None:
    """Each round takes one sample of every measure, in their order."""
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return 1.0

    in_turns(2, lambda: measure("floor"), lambda: measure("work"))
    assert calls == ["floor", "work", "floor", "work"]
