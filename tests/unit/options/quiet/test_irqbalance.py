"""What irqbalance answers on its socket."""

from __future__ import annotations

import pytest

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.options.quiet.services import Setup, parse_setup


@pytest.mark.parametrize(
    ("answer", "setup"),
    [
        (b"SLEEP 10 BANNED 0000000c", Setup(10, CpuSet({2, 3}))),
        (b"SLEEP 10 BANNED 0\0", Setup(10, EMPTY)),
        (
            b"SLEEP 5 IRQ 24 LOAD 3 DIFF 0 CLASS 2 BANNED 00000001,00000000",
            Setup(5, CpuSet({32})),
        ),
    ],
)
def test_setup(answer: bytes, setup: Setup) -> None:
    """How often it acts, and the pCPUs that it keeps clear."""
    assert parse_setup(answer) == setup


@pytest.mark.parametrize("answer", [b"", b"SLEEP 10", b"SLEEP x BANNED 3", b"SLEEP 1 BANNED x"])
def test_another_answer(answer: bytes) -> None:
    """Anything else is no setup."""
    with pytest.raises(ParseError, match="irqbalance"):
        parse_setup(answer)
