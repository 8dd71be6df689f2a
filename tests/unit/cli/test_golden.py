"""What every rendering looks like, at several widths; run this file to write the golden files."""

from pathlib import Path

import pytest

from kata_pin.cli.render.layout import Output
from tests.unit.cli.cases import CASES, golden

FOLDER = Path(__file__).parents[2] / "data" / "cli"


@pytest.mark.parametrize("name", CASES)
def test_rendering_is_the_golden_one(name: str) -> None:
    """The lines are those that a person has looked at."""
    assert golden(name) == (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [40, 47, 60, 61, 79, 80, 100, 132, 250])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    """At any usual width every line fits."""
    assert [line.plain for line in CASES[name](Output(width)) if line.cell_len > width] == []


@pytest.mark.parametrize("name", CASES)
def test_lines_are_printable(name: str) -> None:
    """No control character, direction mark or newline of a foreign text reaches the terminal."""
    assert all(line.plain.isprintable() for line in CASES[name](Output(80)))


def test_every_golden_file_has_a_case() -> None:
    """No file is left over from a case that is gone."""
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)


if __name__ == "__main__":
    for case in CASES:
        (FOLDER / f"{case}.txt").write_text(golden(case))
