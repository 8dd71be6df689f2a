"""The kernel's command line."""

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.options.quiet.read import MAX_TEXT, parse_bootline


def test_parameters() -> None:
    """The last value counts, quotes protect spaces, and what follows `--` is init's."""
    data = b'ro isolcpus=managed_irq,4-7 dyndbg="file a.c +p; x" nohz-full=1 nohz_full=4 -- q=1\n'
    assert parse_bootline(data) == {
        "ro": "",
        "isolcpus": "managed_irq,4-7",
        "dyndbg": "file a.c +p; x",
        "nohz_full": "4",
    }


@pytest.mark.parametrize("data", [b"", b"\n", b'"', b"=", b"\xff\xfe"])
def test_odd_lines(data: bytes) -> None:
    """They are no error."""
    assert "isolcpus" not in parse_bootline(data)


def test_too_long() -> None:
    """More than any kernel takes is refused."""
    with pytest.raises(ParseError, match="longer than"):
        parse_bootline(b"a" * (MAX_TEXT + 1))
