"""Reading the kubelet's checkpoint: absent, damaged, not root's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import StateError
from kata_pin.peers.kubelet.checkpoint import read_kubelet

GOOD = '{"policyName":"none","defaultCpuSet":"4-6","checksum":354655845}'


def test_a_good_file(tmp_path: Path) -> None:
    """The checkpoint's content is returned."""
    path = tmp_path / "cpu_manager_state"
    path.write_text(GOOD)
    state = read_kubelet(str(path))
    assert state is not None
    assert (state.policy, state.default) == ("none", CpuSet([4, 5, 6]))


def test_no_file(tmp_path: Path) -> None:
    """No checkpoint is an ordinary state: there is no kubelet here."""
    assert read_kubelet(str(tmp_path / "none")) is None


@pytest.mark.parametrize("text", ["", "{", GOOD.replace("4-6", "4-7"), " " * 300_000])
def test_a_damaged_file(tmp_path: Path, text: str) -> None:
    """A damaged file is an error that names it, never an empty assignment."""
    path = tmp_path / "cpu_manager_state"
    path.write_text(text)
    with pytest.raises(StateError, match=str(path)):
        read_kubelet(str(path))


def test_things_that_are_no_file(tmp_path: Path) -> None:
    """A folder, a FIFO and a symlink are refused at once."""
    (tmp_path / "target").write_text(GOOD)
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "."):
        with pytest.raises(StateError, match=str(tmp_path)):
            read_kubelet(str(tmp_path / name))


def test_below_a_file(tmp_path: Path) -> None:
    """A path through a file is an error, not an absent checkpoint."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="Not a directory"):
        read_kubelet(str(tmp_path / "file" / "x"))
