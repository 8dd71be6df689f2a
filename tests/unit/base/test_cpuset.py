"""CpuSet: Linux's two text forms, bounds, and what it refuses."""

from __future__ import annotations

import pickle
import time

import pytest

from kata_pin.base.cpuset import EMPTY, MAX_CPU, MAX_TEXT, CpuSet, union
from kata_pin.base.errors import ParseError


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        pytest.param("", [], id="empty"),
        pytest.param(" \n", [], id="only white space"),
        pytest.param("0", [0], id="one"),
        pytest.param("0-3,8", [0, 1, 2, 3, 8], id="range and one"),
        pytest.param("8,0-3\n", [0, 1, 2, 3, 8], id="any order, final newline"),
        pytest.param("0-3,2-5", [0, 1, 2, 3, 4, 5], id="overlapping"),
        pytest.param("007", [7], id="leading zeros are decimal"),
        pytest.param("5-5", [5], id="a range of one"),
        pytest.param("8191", [8191], id="the highest"),
    ],
)
def test_parse(text: str, cpus: list[int]) -> None:
    """Linux's list format is read as cpuset(7) describes it."""
    assert list(CpuSet.parse(text)) == cpus


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("0-99999999999", id="far too long a range"),
        pytest.param("99999999999", id="far too high"),
        pytest.param("8192", id="one too high"),
        pytest.param("0-8192", id="a range one too high"),
        pytest.param("3-1", id="backwards"),
        pytest.param("0-7:2/4", id="stride"),
        pytest.param("-1", id="sign"),
        pytest.param("1-", id="open range"),
        pytest.param(",", id="empty elements"),
        pytest.param("1,,2", id="an empty element"),
        pytest.param("1, 2", id="inner white space"),
        pytest.param("1\n2", id="inner newline"),
        pytest.param("0x3", id="hex"),
        pytest.param("1_0", id="underscore, which int() takes"),
        pytest.param("\u0661", id="a digit of another script, which int() takes"),
        pytest.param("all", id="a word"),
        pytest.param("1\x00", id="a zero byte"),
        pytest.param("1," * MAX_TEXT, id="too long"),
    ],
)
def test_parse_refuses(text: str) -> None:
    """Anything else is a ParseError that names its source and clips the text."""
    with pytest.raises(ParseError) as caught:
        CpuSet.parse(text, source="the cpuset of c1")
    assert caught.value.source == "the cpuset of c1"
    assert len(str(caught.value)) < 200


def test_hostile_lists_cost_nothing() -> None:
    """The longest text accepted is read in a moment, whatever it holds (D17)."""
    start = time.process_time()
    for text in (("0-8191," * (MAX_TEXT // 7))[:-1], "0-" + "9" * (MAX_TEXT - 2)):
        try:
            CpuSet.parse(text)
        except ParseError:
            continue
    assert time.process_time() - start < 1


@pytest.mark.parametrize("cpu", [-1, MAX_CPU + 1])
def test_numbers_out_of_range(cpu: int) -> None:
    """A CPU number outside 0..MAX_CPU is refused by every constructor."""
    with pytest.raises(ParseError):
        CpuSet([cpu])
    with pytest.raises(ParseError):
        CpuSet.from_bits(-1 if cpu < 0 else 1 << cpu)


def test_first_of_nothing() -> None:
    """An empty set has no first CPU."""
    assert CpuSet([9, 4]).first == 4
    with pytest.raises(ValueError, match="empty"):
        EMPTY.first  # noqa: B018 - the property is what is tested


def test_shown() -> None:
    """The text is Linux's list."""
    cpus = CpuSet([0, 1, 2, 5, 33])
    assert str(cpus) == "0-2,5,33"
    assert repr(cpus) == "CpuSet('0-2,5,33')"
    assert str(EMPTY) == ""


def test_is_a_value() -> None:
    """Equal sets are one key, differ from other types, and survive pickling."""
    assert {CpuSet([1, 2]), CpuSet.parse("1-2")} == {CpuSet([2, 1])}
    assert CpuSet([1]) != {1}
    assert pickle.loads(pickle.dumps(CpuSet([1, 700]))) == CpuSet([1, 700])
    assert "1" not in CpuSet([1])
    assert -1 not in CpuSet([1])


def test_union_of_none() -> None:
    """The union of no sets is empty."""
    assert union([]) == EMPTY
