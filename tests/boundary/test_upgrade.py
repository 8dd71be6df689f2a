"""The registry's file over an upgrade: what a former daemon recorded is used, or rebuilt."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node

ALL = "0-15"
RECORDED = sorted((Path(__file__).parent.parent / "data/registry").glob("*.sql"))


async def _upgraded(node: Node, text: str) -> tuple[Vm, Vm]:
    """Start a daemon over a recorded registry, with the VMs that the recording is about."""
    first, second = node.vm("p1"), node.vm("p2")
    await node.start()
    boot = dict(node.rows("meta"))["boot_id"]
    await node.stop()
    for file in node.runtime_dir.glob("registry.db*"):
        file.unlink()
    with closing(sqlite3.connect(node.runtime_dir / "registry.db")) as registry:
        registry.executescript(text.replace(":boot", f"'{boot}'"))
    (node.runtime_dir / "registry.db").chmod(0o600)
    first.persist(c1="4-5")
    second.persist(c2="8")
    await node.start()
    return first, second


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.stem)
async def test_every_former_file_is_read(node: Node, recorded: Path) -> None:
    """Pairs stay, a released sandbox is left alone, and an undo restores what was there first."""
    assert len(RECORDED) > 2
    try:
        p1, p2 = await _upgraded(node, recorded.read_text())
        await node.placed(p1, v0="5", v1="4")
        assert set(p2.masks.values()) == {ALL}
        assert [file.name for file in node.runtime_dir.glob("registry.db.*")] == []
        await node.ask("unpin", sandbox="p1")
        assert p1.masks == {"v0": "2-3", "v1": "2-3", "io": ALL, "main": "1"}
        await node.create(p2, "c3", "9")
        await node.ask("pin", sandbox="p2")
        await node.placed(p2, main="8-9")
        await node.kill()
        await node.start()
        await node.placed(p2, main="8-9")
        assert {"c1", "c2", "c3"} <= {name for (name,) in node.rows("containers", "id")}
    finally:
        await node.__aexit__(None, None, None)


async def test_a_later_version_is_set_aside(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """After a downgrade: the file is kept, and the state is rebuilt from what runs."""
    text = RECORDED[-1].read_text().replace("('version','1')", "('version','2')")
    try:
        p1, _ = await _upgraded(node, text)
        await node.placed(p1, v0="4-5")
        (aside,) = node.runtime_dir.glob("registry.db.version-*")
        with closing(sqlite3.connect(aside)) as file:
            assert file.execute("SELECT sandbox_id FROM released").fetchall() == [("p2",)]
        assert str(aside) in caplog.text
    finally:
        await node.__aexit__(None, None, None)
