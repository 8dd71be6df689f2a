"""The locks: one writer per runtime directory, one per node."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.config.tree import Config, Paths
from kata_pin.base.errors import DaemonError
from kata_pin.linux.files import HostRoot
from kata_pin.service.runtime_dir import hand_over, holder, locked, node_locked


def _config(folder: Path, name: str = "kp", vc: str = "") -> Config:
    paths = Paths(vc=vc) if vc else Paths()
    return Config(runtime_dir=str(folder / name), paths=paths)


@pytest.fixture
def lock(tmp_path: Path) -> str:
    return str(tmp_path / "kata-pin/lock")


@pytest.mark.skipif(os.geteuid() != 0, reason="the node's lock is root's")
def test_one_daemon_per_node(tmp_path: Path, lock: str) -> None:
    """The second is refused whatever its runtime directory, until the first has ended."""
    refused = pytest.raises(
        DaemonError, match=rf"another kata-pin.*it holds {lock} \(process {os.getpid()}\b"
    )
    with node_locked(_config(tmp_path), lock=lock):
        with refused, node_locked(_config(tmp_path, "other"), lock=lock):
            pass
        assert Path(lock).stat().st_mode & 0o777 == 0o600
    with node_locked(_config(tmp_path, "other"), lock=lock):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="the node's lock is root's")
def test_the_default_directorys_lock_is_the_nodes(tmp_path: Path, lock: str) -> None:
    """It is taken once, and keeps daemons with other directories out."""
    config = _config(tmp_path, "kata-pin")
    os.makedirs(config.runtime_dir)
    with (
        locked(config.runtime_dir),
        node_locked(config, lock=lock),
        pytest.raises(DaemonError, match="another kata-pin runs on this node"),
        node_locked(_config(tmp_path, "other"), lock=lock),
    ):
        pass


@pytest.mark.parametrize("there", [True, False])
def test_another_kata_is_another_node(tmp_path: Path, lock: str, there: bool) -> None:
    """Daemons with a Kata of their own run side by side; with the same one they do not."""
    vc = tmp_path / "vc"
    if there:
        vc.mkdir()
    config = _config(tmp_path, vc=str(vc))
    with node_locked(config, lock=lock), node_locked(_config(tmp_path, vc=f"{vc}2"), lock=lock):
        refused: Any = (
            pytest.raises(DaemonError, match=f"it holds {lock}-") if there else nullcontext()
        )
        with refused, node_locked(_config(tmp_path, "other", vc=str(vc)), lock=lock):
            pass


def test_who_can_read_katas_folder_holds_no_lock(tmp_path: Path, lock: str) -> None:
    """Anybody may lock a folder that he can open."""
    vc = tmp_path / "vc"
    vc.mkdir(mode=0o755)
    folder = os.open(vc, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with node_locked(_config(tmp_path, vc=str(vc)), lock=lock):
            assert os.listdir(vc) == []
    finally:
        os.close(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_the_services_user_can_take_a_lock_that_root_made(tmp_path: Path, lock: str) -> None:
    """The folder is that user's, so the file is too; a link there is not followed."""
    os.makedirs(os.path.dirname(lock))
    os.chown(os.path.dirname(lock), 4242, 4242)
    with node_locked(_config(tmp_path), lock=lock):
        status = os.stat(lock)
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (4242, 4242, 0o600)
    os.unlink(lock)
    victim = tmp_path / "victim"
    victim.write_text("")
    os.symlink(victim, lock)
    with node_locked(_config(tmp_path), lock=lock):
        pass
    assert victim.stat().st_uid == 0
    os.unlink(lock)
    os.link(victim, lock)
    with node_locked(_config(tmp_path), lock=lock):
        assert victim.stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_only_files_of_ours_are_handed_over(tmp_path: Path) -> None:
    """A file with another name elsewhere, a link and a third user's file keep their owners."""
    home, theirs = tmp_path / "kp", {name: tmp_path / name for name in ("shadow", "passwd")}
    home.mkdir()
    for path in theirs.values():
        path.write_text("")
    os.link(theirs["shadow"], home / "registry.db")
    os.symlink(theirs["passwd"], home / "registry.db-wal")
    (home / "registry.db-shm").write_text("")
    os.chown(home / "registry.db-shm", 4243, 4243)
    (home / "lock").write_text("")
    hand_over(str(home), 4242, 4242)
    assert (home.stat().st_uid, (home / "lock").stat().st_uid) == (4242, 4242)
    assert {path.stat().st_uid for path in theirs.values()} == {0}
    assert (home / "registry.db-shm").stat().st_uid == 4243


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_the_services_user_holds_the_nodes_lock() -> None:
    """A process of uid 4242 that owns the folder keeps others out; one of 4243 goes without."""
    code = (
        "import os, sys; from kata_pin.base.config.tree import Config; "
        "from kata_pin.service import runtime_dir\n"
        # Only after the imports: the interpreter may lie below a home directory.
        "uid = int(sys.argv[2]); os.setgroups([]); os.setgid(uid); os.setuid(uid); os.chdir('/')\n"
        "runtime_dir.OUR_UID = uid\n"
        "with runtime_dir.node_locked(Config(runtime_dir='/nonexistent'), lock=sys.argv[1]):\n"
        "    print('in', flush=True); sys.stdin.read()"
    )
    with tempfile.TemporaryDirectory(prefix="kp") as top:
        os.chmod(top, 0o755)
        folder = Path(top, "kata-pin")
        folder.mkdir()
        lock = str(folder / "lock")
        for uid, kept_out in ((4242, True), (4243, False)):
            os.chown(folder, 4242, 4242)
            os.chmod(folder, 0o750)
            with subprocess.Popen(
                [sys.executable, "-c", code, lock, str(uid)], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            ) as other:  # fmt: skip
                assert other.stdout is not None
                assert other.stdout.readline() == "in\n"
                refused: Any = pytest.raises(DaemonError) if kept_out else nullcontext()
                with refused, node_locked(_config(Path(top)), lock=lock):
                    pass
                other.communicate("")


def test_who_serves_a_directory(tmp_path: Path) -> None:
    """Nobody, this process, or a pod whose cgroup says so."""
    assert str(holder(str(tmp_path))) == ""
    with locked(str(tmp_path)):
        assert holder(str(tmp_path)).pid == os.getpid()
    found = (tmp_path / "lock").stat()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    pod = "1f3c9a52-77aa-4b1e-9d34-0123456789ab"
    (tmp_path / "proc/812").mkdir(parents=True)
    (tmp_path / "proc/locks").write_text(f"1: FLOCK  ADVISORY  WRITE 812 {place} 0 EOF\n")
    (tmp_path / "proc/812/cgroup").write_text(f"0::/kubepods/pod{pod}/f00\n")
    assert holder(str(tmp_path), HostRoot(str(tmp_path))).pod == pod
