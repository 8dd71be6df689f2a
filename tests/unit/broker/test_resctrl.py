"""Groups of resctrl in the broker: only our own names, only classes of the first message."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from errno import EACCES, EINVAL
from pathlib import Path

import pytest

from kata_pin.broker.operations import Operations
from kata_pin.broker.policy import Policy
from kata_pin.broker.protocol import (
    Change,
    parse_changed,
    parse_group,
    render_changes,
    render_group,
)
from kata_pin.broker.resctrl import Resctrl
from tests.support.resctrl_tree import ResctrlTree

BAD = ("..", ".", "../x", "a/b", "", "-x", "a b", "a\nb", "x" * 300)


@pytest.mark.parametrize("name", BAD)
def test_names_that_are_no_names(tmp_path: Path, name: str) -> None:
    """Nothing that could lead elsewhere reaches the file system."""
    tree = ResctrlTree(tmp_path)
    resctrl = Resctrl({name: "L3:0=f"}, str(tree.top), tree)
    attempts: tuple[Callable[[], object], ...] = (
        lambda: resctrl.make("", name),
        lambda: resctrl.remove("", name),
        lambda: resctrl.join("", name, []),
    )
    for attempt in attempts:
        with pytest.raises(OSError, match=r"not the name|no group") as refused:
            attempt()
        assert refused.value.errno == EINVAL
    if name:
        with pytest.raises(OSError, match="not the name"):
            resctrl.make(name, "pod")
        with pytest.raises(OSError, match="not the name"):
            resctrl.remove(name, "")
    assert tree.calls == []


def test_a_class_is_one_of_the_first_message(tmp_path: Path) -> None:
    """Others are refused before anything is made."""
    tree = ResctrlTree(tmp_path)
    resctrl = Resctrl({"fast": "L3:0=f;1=f"}, str(tree.top), tree)
    with pytest.raises(PermissionError):
        resctrl.make("other", "pod")
    assert tree.calls == []
    resctrl.make("fast", "pod")
    resctrl.make("fast", "pod")
    assert (tree.top / "kata-pin-fast/mon_groups/kata-pin-pod").is_dir()


def test_a_class_of_older_settings_gets_the_new_schemata(tmp_path: Path) -> None:
    """What a former daemon left is written again by the next broker."""
    tree = ResctrlTree(tmp_path)
    Resctrl({"fast": "L3:0=f"}, str(tree.top), tree).make("fast", "pod")
    Resctrl({"fast": "L3:0=ff"}, str(tree.top), tree).make("fast", "pod")
    assert (tree.top / "kata-pin-fast/schemata").read_text() == "L3:0=ff\n"


def test_requests_survive() -> None:
    """A group and its threads arrive as they were sent."""
    threads = [Change(10, 11, 5, 7, frozenset())]
    sent = render_group("fast", "pod", render_changes(threads))
    assert parse_group(sent) == ("fast", "pod", threads)
    assert parse_group(render_group("", "pod")) == ("", "pod", [])
    for wrong in (b"", b"a", b"a\0b", b"\xe4\0b\0", b"a\0b\0x"):
        with pytest.raises((ValueError, struct.error)):
            parse_group(wrong)


def test_threads_of_strangers_join_nothing() -> None:
    """A process that is no VMM is refused before the tree is touched; classes come with rules."""
    policy = Policy(b"qfast L3:0=f MB:0=50\0x/usr/bin/qemu-system-x86_64")
    assert policy.classes == {"fast": "L3:0=f MB:0=50"}
    stranger = Change(os.getpid(), os.getpid(), 1, 0, frozenset())
    request = render_group("", "pod", render_changes([stranger]))
    (done,) = parse_changed(Operations(policy).run(b"J", request, ()).data)
    assert done.errno == EACCES, sys.executable
