"""The kernel's hexadecimal masks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kata_pin.base.cpuset import MAX_CPU, CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.linux.proc import parse_mask


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        (b"f\n", "0-3"),
        (b"00000000,0000000f\n", "0-3"),
        (b"1,00000000", "32"),
        (b"80000000,00000001", "0,63"),
        (b"0", ""),
    ],
)
def test_masks_of_the_kernel(text: bytes, cpus: str) -> None:
    """Each group of eight digits is 32 CPUs."""
    assert parse_mask(text, "a file") == CpuSet.parse(cpus)


@pytest.mark.parametrize("text", [b"", b"0x3", b"3,", b"123456789", b"-1", b"1 2", b"f," * 5000])
def test_what_is_no_mask(text: bytes) -> None:
    """Anything else is refused with the name of the file."""
    with pytest.raises(ParseError, match="a file"):
        parse_mask(text, "a file")


@given(st.sets(st.integers(0, MAX_CPU)))
def test_what_is_written_reads_back(cpus: set[int]) -> None:
    """And it has no leading zeros: the kernel counts words."""
    text = CpuSet(cpus).hex_mask()
    assert parse_mask(text.encode(), "a file") == CpuSet(cpus)
    assert text == "0" or text[0] != "0"
