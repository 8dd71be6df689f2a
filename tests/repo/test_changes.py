"""A file of changes/ has the form that its README asks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

FOLDER: Final = Path(__file__).resolve().parents[2] / "changes"
NAME: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+\.md")
KINDS: Final = ("added", "changed", "fixed", "removed", "security")


def _problem(name: str, text: str) -> str:
    """Return what is wrong with a fragment; empty if nothing is."""
    kind, _, words = text.partition("\n")
    if not NAME.fullmatch(name):
        return "its name is not AREA-WHAT.md"
    if kind not in KINDS:
        return f"its first line is not one of {', '.join(KINDS)}"
    return "" if words.strip().endswith(".") else "it has no sentence"


def test_every_fragment_has_the_form() -> None:
    files = [path for path in FOLDER.iterdir() if path.name != "README.md"]
    problems = {path.name: _problem(path.name, path.read_text()) for path in files}
    assert {name: problem for name, problem in problems.items() if problem} == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("doctor.md", "fixed\nIt works."),
        ("doctor-works.txt", "fixed\nIt works."),
        ("doctor-works.md", "It works."),
        ("doctor-works.md", "fixed\n"),
    ],
)
def test_another_form_is_found(name: str, text: str) -> None:
    assert _problem(name, text)
    assert not _problem("doctor-works.md", "fixed\nIt works.\n")
