"""Two checkouts beside each other: what is compared, and what a failed run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import compare
from tests.bench.figures import Row


def rows(*made: Row) -> str:
    """Return rows as `scripts/bench --json` prints them."""
    return "[" + ",".join(row.as_json() for row in made) + "]"


def test_a_figure_with_a_floor_is_compared_by_its_ratio() -> None:
    """A machine that was slower meanwhile made the floor slower too."""
    made = rows(Row("show", 90, "ms", 3, floor=30, ratio=3.0), Row("left", 2, "threads", 20))
    assert compare.figures_of(json.loads(made)) == {
        "show, x its floor": 3.0, "left, threads": 2,
    }  # fmt: skip


def test_medians_of_both_are_beside_each_other() -> None:
    """A row that only one checkout has is shown all the same."""
    ours = [{"a": 1.0, "new": 5.0}, {"a": 3.0, "new": 5.0}, {"a": 2.0}]
    theirs = [{"a": 4.0, "zero": 0.0}, {}]
    assert [line.split() for line in compare.lines(ours, theirs)] == [
        ["name", "here", "there", "here/there"],
        ["a", "2.00", "4.00", "0.50"],
        ["new", "5.00", "-", "-"],
        ["zero", "-", "0.00", "-"],
    ]


@pytest.mark.parametrize("other_fails", [True, False])
def test_checkouts_take_turns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *,
    other_fails: bool,
) -> None:
    """Both run every turn with the same arguments; a run that failed is said and is the status."""
    said = tmp_path / "said"
    for name, value, status in (("ours", 2, 0), ("theirs", 4, int(other_fails))):
        script = tmp_path / name / "scripts" / "bench"
        script.parent.mkdir(parents=True)
        text = rows(Row("x", value, "ms", 1))
        script.write_text(f"#!/bin/sh\necho {name} $* >> {said}\necho '{text}'\nexit {status}\n")
        script.chmod(0o755)
    monkeypatch.setattr(compare, "HERE", tmp_path / "ours")
    assert compare.compared(["state"], tmp_path / "theirs", 2, ["--quick"]) == int(other_fails)
    order = ["ours", "theirs", "theirs", "ours"]
    assert said.read_text().splitlines() == [f"{name} state --json --quick" for name in order]
    shown = capfd.readouterr()
    assert "x, ms  2.00   " in shown.out
    assert ("4.00        0.50" in shown.out) is not other_fails
    assert ("failed in" in shown.err) is other_fails
