"""docs/broker.md has all rows of the broker; what they do is in tests/boundary."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest

from kata_pin.rights.broker import libc, rows
from kata_pin.rights.broker.rows import ROWS
from kata_pin.rights.broker.tunables import TUNABLE_FILES, TunableKind

PAGE = Path(__file__).parents[4] / "docs" / "broker.md"


def test_the_page_names_each_row_with_its_arguments() -> None:
    """docs/broker.md has the same rows in the same order, and says of each what it reaches."""
    found = []
    table = PAGE.read_text().partition("## The rows")[2].partition("\n## ")[0]
    for line in table.splitlines():
        match = re.match(r"\| `([a-z-]+)` \| (.*?) \| (.*?) \| (.*?) \|$", line)
        if match is not None:
            arguments = tuple(re.findall(r"`([a-z_]+)`", match[2]))
            found.append((match[1], arguments))
            assert len(match[3]) > 10, match[1]
            assert len(match[4]) > 10, match[1]
    expected = [(row.name, tuple(argument.name for argument in row.arguments)) for row in ROWS]
    assert found == expected


def test_the_broker_and_its_page_have_each_kind_of_tunable() -> None:
    """But for irqbalance's, which is asked over its socket."""
    kinds = {kind.value for kind in TunableKind} - {"irqbalance"}
    assert set(TUNABLE_FILES) == kinds
    page = PAGE.read_text().partition("## Tunables")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([a-z-]+)`", page)) >= kinds


def test_the_page_counts_the_brokers_lines() -> None:
    """Within a hundred lines, so that nobody believes it to be smaller than it is."""
    (said,) = re.findall(r"([0-9],[0-9]{3}) lines", PAGE.read_text())
    folder = Path(rows.__file__).parent
    lines = sum(len(path.read_text().splitlines()) for path in folder.glob("*.py"))
    assert abs(int(said.replace(",", "")) - lines) < 100, lines


def test_every_row_that_is_switched_off_is_named_by_the_page() -> None:
    """The settings that rows depend on are in the page's words."""
    page = PAGE.read_text()
    assert {row.feature for row in ROWS if row.feature} == {
        *("nri", "cri", "pods", "quiet", "resctrl", "memory", "qmp", "thread_events"),
    }
    for row in ROWS:
        line = next(line for line in page.splitlines() if line.startswith(f"| `{row.name}` |"))
        assert not row.feature or "only" in line, row.name


def test_perf_events_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon chooses the CPU alone: what is recorded, and of whom, is not its to say."""
    asked: list[tuple[object, ...]] = []

    class Recorded:
        def call(self, name: str, *arguments: object) -> int:
            asked.append((name, *arguments))
            return os.open(os.devnull, os.O_RDONLY)

    monkeypatch.setattr(libc, "libc", Recorded)
    os.close(libc.open_switches(3))
    ((name, _, attributes, *others),) = asked
    assert (name, others) == ("syscall", [-1, 3, -1, 8]), "any task of CPU 3, closed by execve"
    assert isinstance(attributes, bytes)
    kind, size, config, period, fields, _, bits = struct.unpack_from("=IIQQQQQ", attributes)
    assert (kind, size, config, period) == (1, 136, 0, 250_000_000), "a software clock"
    assert fields == 0x2 | 0x4 | 0x80, "thread, time and CPU: no registers, stacks or addresses"
    assert bits == 1 | 1 << 9 | 1 << 13 | 1 << 14 | 1 << 18 | 1 << 25 | 1 << 26
