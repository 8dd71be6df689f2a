"""The files that are put on a node, and what is known of them: written once, and never by two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.errors import HostError, KataPinError
from kata_pin.cli.node import changes as changes_module
from kata_pin.cli.node.changes import MANIFEST, NodeFiles
from kata_pin.cli.node.files import (
    HOOK_PATH,
    HOOKS_DIR,
    PROGRAM_LINK,
    UNIT,
    Choices,
    NodeFile,
    NodeLink,
    Runtime,
    node_files,
)
from kata_pin.linux.process import open_locked
from kata_pin.service.configuration import DEFAULT_FILE
from tests.support.commandline import run


def tree(root: Path) -> dict[str, bytes]:
    """Return every file below a folder with its content."""
    return {f"/{p.relative_to(root)}": p.read_bytes() for p in root.rglob("*") if p.is_file()}


def package_files(*runtimes: Runtime) -> list[NodeFile]:
    """Return what a package has, and the hooks; a package's program needs no link."""
    found = node_files(Choices(program=PROGRAM_LINK, runtimes=frozenset(runtimes)))
    return [file for file in found if isinstance(file, NodeFile)]


def test_beside_a_package_only_the_hooks_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a package wrote is not recorded; its service goes on, and so do its affinities."""
    package = package_files()
    for file in package:
        target = tmp_path / file.path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
    before, node = tree(tmp_path), NodeFiles(str(tmp_path))
    files = package_files(Runtime.CRIO)
    hooks = {file.path for file in files} - set(before)
    assert all(path.startswith(HOOKS_DIR) for path in hooks)
    for verb in ("wrote", "unchanged"):
        changes = {change.path: change for change in node.install(files)}
        assert {path for path, change in changes.items() if change.verb == verb} == hooks
        assert changes[HOOK_PATH].reason == changes[UNIT].reason == "not from kata-pin install"
    (tmp_path / MANIFEST[1:]).unlink()  # hooks are ours all the same: they name a program
    node.install(files)
    assert node.altered() == ([], [])
    monkeypatch.setattr("kata_pin.cli.commands.install.NodeFiles", lambda _: node)
    monkeypatch.setattr("kata_pin.cli.commands.install.release_pins", None)
    assert run(["uninstall"]) == 0
    said = capsys.readouterr().out
    assert f"affinities are kept: {UNIT} is not from kata-pin install" in said
    assert "disable" not in said
    assert tree(tmp_path) == before


def test_what_is_written_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest first; a file's content before its name, and the name before the next file."""
    done: list[str] = []
    rename = os.rename

    def fsync(descriptor: int) -> None:
        done.append(f"sync {os.path.relpath(os.readlink(f'/proc/self/fd/{descriptor}'), tmp_path)}")
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            assert os.fstat(descriptor).st_size, "still in a buffer"

    def renamed(source: str, target: str) -> None:
        done.append(f"rename {os.path.relpath(target, tmp_path)}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    NodeFiles(str(tmp_path)).install([NodeFile("/a/b", b"text"), NodeLink("/c/d", "/a/b")])
    manifest = MANIFEST[1:]
    assert done == [
        *(f"sync {manifest}.new", f"rename {manifest}", f"sync {os.path.dirname(manifest)}"),
        *("sync a/b.new", "rename a/b", "sync a"),
        *("rename c/d", "sync c"),
    ]


def test_settings_are_the_administrators(tmp_path: Path) -> None:
    """A newer sample does not replace the file, although nobody has changed it."""
    node, old = NodeFiles(str(tmp_path)), NodeFile(DEFAULT_FILE, b"version: 1\n", settings=True)
    node.install([old])
    (change,) = node.install([replace(old, content=b"version: 1\nmode: observe\n")])
    assert change.verb == "kept"
    assert (tmp_path / DEFAULT_FILE.lstrip("/")).read_bytes() == old.content


def test_a_lock_that_its_holder_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who opened the file just before it was removed holds a lock that no other run meets."""
    lock, opened = tmp_path / "lock", list[int]()
    monkeypatch.setattr(changes_module, "LOCK", str(lock))

    def removed_meanwhile(path: str, *others: Any) -> int:
        opened.append(open_locked(path, *others))
        if len(opened) == 1:
            os.unlink(path)
        return opened[-1]

    monkeypatch.setattr(changes_module, "open_locked", removed_meanwhile)
    with NodeFiles().locked():
        assert lock.exists()
        with pytest.raises(KataPinError, match="is running"), NodeFiles().locked():
            pass


def test_two_runs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused: both would change one manifest. Below another root nobody waits."""
    monkeypatch.setattr(changes_module, "LOCK", f"{tmp_path}/lock")
    with NodeFiles().locked():
        said = rf"install or uninstall is running \(process {os.getpid()}.*, since 2"
        with pytest.raises(KataPinError, match=said), NodeFiles().locked():
            pass
        with NodeFiles(str(tmp_path)).locked():
            pass
    assert list(tmp_path.iterdir()) == []
    with NodeFiles().locked():
        pass
    monkeypatch.setattr(changes_module, "LOCK", f"{tmp_path}/none/lock")
    with pytest.raises(HostError, match=r"cannot open .*lock: No such file"), NodeFiles().locked():
        pass
