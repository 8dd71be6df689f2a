"""docs/verification.md has a row for each part of scripts/chaos."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.__main__ import PARTS, main

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
