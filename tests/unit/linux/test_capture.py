"""Captured hosts: listings and folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.base.errors import HostError, ParseError
from kata_pin.linux import topology
from kata_pin.linux.topology import read_capture, read_topology
from tests.support.hosttree import SYSFS, grow, listing

NAMES = sorted(path.stem for path in SYSFS.glob("*.tree"))


@pytest.mark.parametrize("name", NAMES)
def test_listing_and_folder_are_the_same_host(name: str, tmp_path: Path) -> None:
    """Every recorded listing is read as its folder is, and nothing is left behind."""
    root = grow(tmp_path, listing(name))
    assert read_capture(str(SYSFS / f"{name}.tree")) == read_topology(root)
    assert read_capture(str(tmp_path)) == read_topology(root)


@pytest.mark.parametrize(
    "line",
    [
        "sys/devices/system/cpu/online",
        "../etc/passwd\tx",
        "sys/../../etc/passwd\tx",
        "/sys/devices/system/cpu/online\t0",
        "sys/./x\t0",
        "sys\t0",
        "proc/cpuinfo\tx",
        "sys/" + "a/" * 40 + "b\tx",
        "sys/" + "a" * 300 + "\tx",
        "\x00\t",
    ],
)
def test_nothing_is_written_elsewhere(line: str, tmp_path: Path) -> None:
    """A place that is not below sys, or is no place at all, is refused with its line."""
    path = tmp_path / "bad.tree"
    path.write_text(f"sys/devices/system/cpu/online\t0\n\n{line}\n")
    with pytest.raises(ParseError, match=r"bad\.tree:2"):
        read_capture(str(path))


def test_contradictions(tmp_path: Path) -> None:
    """A file that is a folder too, no list of CPUs, no file at all: errors that say so."""
    path = tmp_path / "odd.tree"
    path.write_text("sys/devices\t1\nsys/devices/system\t2\n")
    with pytest.raises(HostError, match=r"odd\.tree"):
        read_capture(str(path))
    path.write_text("")
    with pytest.raises(HostError, match="online"):
        read_capture(str(path))
    with pytest.raises(HostError, match="missing"):
        read_capture(str(tmp_path / "missing"))


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing that is too long is refused before it is unfolded."""
    path = tmp_path / "long.tree"
    path.write_text("sys/a\t1\n" * 20)
    monkeypatch.setattr(topology, "MAX_FILES", 10)
    with pytest.raises(ParseError, match="more than 10 files"):
        read_capture(str(path))
    monkeypatch.setattr(topology, "MAX_BYTES", 100)
    with pytest.raises(ParseError, match="longer than 100 bytes"):
        read_capture(str(path))
