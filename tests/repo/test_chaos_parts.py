"""docs/verification.md has a row for each part of scripts/chaos."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.__main__ import PARTS, main
from tests.chaos.churning import LIVES, LOOKS, at_least_one_sandbox

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "verification.md"


def test_every_part_is_in_the_table() -> None:
    """The table has the parts and nothing else, in the order of the list."""
    section = DOCUMENT.read_text().split("## Chaos\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| ([a-z0-9]+) \|", section, re.MULTILINE)
    assert [one for one in rows if one != "part"] == list(PARTS)


def test_without_a_part_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """The list is what somebody sees first."""
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in PARTS)
    with pytest.raises(SystemExit):
        main(["nothing"])


def test_churn_has_a_sandbox_before_its_first_look() -> None:
    """However small its count; without one there is no history, and the look fails."""
    assert at_least_one_sandbox(1) * LOOKS[0] == LIVES
    assert at_least_one_sandbox(2000) == 2000
