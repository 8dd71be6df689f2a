"""The start time alone, as hot paths read it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.linux.kernel_text import parse_starttime
from kata_pin.linux.proc import parse_stat

FIELDS = b" ".join(b"%d" % number for number in range(4, 53))


@pytest.mark.parametrize("comm", [b"qemu", b") R 1 2", b"a\nb (c) d", b""])
def test_any_name(comm: bytes) -> None:
    """A name with brackets, spaces and newlines moves no field: both parsers agree."""
    stat = b"77 (" + comm + b") S " + FIELDS + b"\n"
    assert parse_starttime(stat) == parse_stat(stat).starttime == 22


def test_own_threads() -> None:
    """On this kernel both parsers agree for every thread of this process."""
    for tid in os.listdir("/proc/self/task"):
        stat = Path(f"/proc/self/task/{tid}/stat").read_bytes()
        assert parse_starttime(stat) == parse_stat(stat).starttime


@pytest.mark.parametrize("cut", [b"", b"77 (qemu", b"77 (qemu) S 1 2", b"77 (q) S " + b"x " * 40])
def test_cut_short(cut: bytes) -> None:
    """What is no whole stat file is a ParseError."""
    with pytest.raises(ParseError):
        parse_starttime(cut)
