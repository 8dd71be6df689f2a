"""A registry that cannot be written, is no file of ours, or goes away under the daemon."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Node, private_node
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.skipif(os.cpu_count() == 1, reason="needs two CPUs"),
]

FAST = {"affinity_s": 0.1, "deep_s": 0.5}


@pytest.fixture
def node() -> Iterator[Node]:
    with private_node(new_threads="audit", audit=FAST) as one:
        yield one


@contextlib.contextmanager
def small_file_system(at: Path) -> Iterator[Path]:
    """Mount one of 512 KiB there; yield the path of a file that fills it."""
    at.mkdir(exist_ok=True)
    options = "size=512k,mode=0750"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(at)], check=True)
    try:
        yield at / "filler"
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))


def test_a_full_runtime_directory(node: Node) -> None:
    """Masks follow, audits go on, everything says so, and nothing is lost once there is room."""
    with small_file_system(node.runtime_dir) as filler, contextlib.ExitStack() as end:
        daemon = node.start()
        end.callback(node.end)
        pod = end.enter_context(node.pod("p1"))
        pod.announce()
        pod.create("c1", "1")
        pod.wait_placed({1})
        fill(filler)
        pod.create("c2", "0")
        pod.wait_placed({0, 1})
        victim = pod.kata.vcpus()[0]
        os.sched_setaffinity(victim, {0})
        wait_for(lambda: "registry-unwritten" in _notes(node), "the note")
        checked = node.cli("check", "--json")
        assert checked.returncode == 4
        assert "cannot be written" in json.loads(checked.stdout)["unknown"][0]
        rows = json.loads(node.cli("doctor", "--json").stdout)["rows"]
        assert [row["status"] for row in rows if row["check"] == "registry"] == ["fail"]
        assert "cannot be written" in node.cli("show").stdout
        pod.create("c3", "1")
        filler.unlink()
        wait_for(lambda: "registry-unwritten" not in _notes(node), "the registry to be written")
        wait_for(lambda: {"c1", "c2", "c3"} <= node.registered().keys(), "all to be recorded")
        assert daemon.process.poll() is None


def _notes(node: Node) -> list[str]:
    return [note["code"] for note in node.ask("state")["notes"]]


def test_threads_are_repaired_while_no_registry_can_be_made(node: Node) -> None:
    """The file is gone, and its folder takes no other: memory has what they should be."""
    node.start()
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1")
        pod.wait_placed({1})
        (node.runtime_dir / "registry.db").unlink()
        os.chmod(node.runtime_dir, 0o500)  # not even root's daemon user can make another
        for tid in pod.kata.tids():
            os.sched_setaffinity(tid, {0})
        pod.wait_placed({1})
        os.chmod(node.runtime_dir, 0o750)
        wait_for(lambda: "c1" in node.registered(), "the registry to be written")


def test_a_registry_that_is_removed_is_written_again(node: Node) -> None:
    """What hooks were told is recorded is there after a restart."""
    node.configure(audit={"affinity_s": 3600, "deep_s": 86400})
    daemon = node.start()
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1")
        (node.runtime_dir / "registry.db").unlink()
        pod.create("c2", "0")
        assert {"c1", "c2"} <= node.registered().keys()
        shutil.copy(node.runtime_dir / "registry.db", node.root / "copy")
        os.replace(node.root / "copy", node.runtime_dir / "registry.db")
        pod.create("c3", "1")
        assert {"c1", "c2", "c3"} <= node.registered().keys()
        daemon.terminate()
        node.start()
        assert {"c1", "c2", "c3"} <= node.registered().keys()


def test_a_log_of_the_registry_that_is_removed_is_written_again(node: Node) -> None:
    """Without its file SQLite goes on writing where nobody can read it."""
    node.configure(audit={"affinity_s": 3600, "deep_s": 86400})
    node.start()
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1")
        (node.runtime_dir / "registry.db-wal").unlink()
        pod.create("c2", "0")
        assert "c2" in node.registered()


def _link(path: Path) -> None:
    victim = path.parent.parent / "victim"
    victim.write_text("root's own")
    path.symlink_to(victim)


def _unreadable(path: Path) -> None:
    path.write_text("x")
    path.chmod(0)


def _of_another(path: Path) -> None:
    path.write_text("x")
    os.chown(path, 4242, 4242)
    path.chmod(0o600)


@pytest.mark.parametrize(
    "name", ["registry.db", "registry.db-wal", "spool", "lock", "hook.sock.new", "control.sock"]
)
@pytest.mark.parametrize(
    "make", [Path.mkdir, _link, os.mkfifo, _unreadable, _of_another], ids=lambda make: make.__name__
)
def test_the_daemon_starts_whatever_is_there(
    node: Node, name: str, make: Callable[[Path], object]
) -> None:
    """D15: what is not a file or folder of ours is set aside."""
    node.runtime_dir.mkdir()
    make(node.runtime_dir / name)
    daemon = node.start()
    assert node.hook("poststop", "c9", os.getpid()).stderr == ""
    daemon.terminate()
    folder = make is Path.mkdir and name in ("registry.db", "lock", "control.sock")
    if folder or (make is _unreadable and name == "spool"):
        (aside,) = node.runtime_dir.glob(f"{name}.foreign-*")
        assert str(aside) in node.log
    victim = node.root / "victim"
    assert not victim.exists() or victim.read_text() == "root's own"
