"""The running daemon gives up its rights, keeps its files in order, and lives with its broker."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kata_pin import hook
from tests.support.daemon import Node, assert_unprivileged
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give it up"),
]

NOBODY = 65534


def broker_of(daemon: int) -> int:
    children = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
    return next(int(p) for p in children if "broker" in Path(f"/proc/{p}/comm").read_text())


def test_the_deciding_process_has_no_rights(node: Node) -> None:
    """It pins all the same, and its files are its own; hooks' messages get its group."""
    daemon = node.start()
    assert_unprivileged(daemon.pid)
    with node.pod("p1") as pod:
        assert pod.announce().stderr == ""
        assert pod.create("c1", "1").stderr == ""
        pod.wait_placed({1})
    for name in ("registry.db", "lock", "control.sock", "hook.sock", "spool"):
        assert (node.runtime_dir / name).stat().st_uid == NOBODY
    spool = (node.runtime_dir / "spool").stat()
    assert (stat.S_IMODE(spool.st_mode), spool.st_gid) == (0o700, NOBODY)


def test_what_it_does_not_use_is_not_in_its_memory(node: Node) -> None:
    """asyncio would load OpenSSL, and shutil two compressors."""
    daemon = node.start()
    with node.pod("p1") as pod:
        assert pod.announce().stderr == ""
        maps = Path(f"/proc/{daemon.pid}/maps").read_text()
        assert "libc.so" in maps
        assert [one for one in ("libssl", "libcrypto", "libbz2", "liblzma") if one in maps] == []


@pytest.mark.skipif(os.cpu_count() == 1, reason="needs two CPUs")
def test_kata_pin_itself_keeps_off_exclusive_pcpus(node: Node) -> None:
    """The daemon with all its threads, its broker and that one's readers, hooks and commands."""
    everywhere = os.sched_getaffinity(0)
    daemon = node.start()
    broker = broker_of(daemon.pid)

    def where() -> set[frozenset[int]]:
        readers = Path(f"/proc/{broker}/task/{broker}/children").read_text().split()
        tids = [*os.listdir(f"/proc/{daemon.pid}/task"), str(broker), *readers]
        return {frozenset(os.sched_getaffinity(int(tid))) for tid in tids}

    def here(folder: Path) -> set[int]:
        with ThreadPoolExecutor(1) as other:
            other.submit(hook.leave_exclusive_cpus, str(folder)).result()
            return other.submit(os.sched_getaffinity, 0).result()

    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1", exclusive=True)
        pod.wait_placed({1})
        left = frozenset(everywhere - {1})
        wait_for(lambda: where() == {left}, "kata-pin's processes to leave")
        wait_for(lambda: here(node.runtime_dir) == left, "hooks and commands to be told")
        found = json.loads(node.cli("check", "--json").stdout)["findings"]
        groups = [one["group"] for one in found if one["group"]]
        intruders = {process["pid"] for group in groups for process in group["processes"]}
        assert os.getpid() in intruders
        assert not {daemon.pid, broker} & intruders
    wait_for(lambda: where() == {frozenset(everywhere)}, "kata-pin to use the pCPU again")
    wait_for(lambda: here(node.runtime_dir) == everywhere, "hooks and commands to be told")
    assert "may run on exclusive" not in node.log


def test_what_root_left_is_mended(node: Node) -> None:
    """Commands without a daemon, and hooks without one, leave root's files: they are taken over."""
    assert node.cli("pin").returncode == 0, "a command of root makes the registry"
    assert (node.runtime_dir / "registry.db").stat().st_uid == 0
    with node.pod("p1") as pod:
        (node.runtime_dir / "spool").mkdir(mode=0o700, exist_ok=True)
        assert "spooled" in pod.announce().stderr
        node.start()
        wait_for(lambda: not node.spooled(), "the spool taken in")
        assert pod.id in node.registered()
    assert (node.runtime_dir / "registry.db").stat().st_uid == NOBODY
    assert node.daemon is not None
    node.daemon.terminate()
    assert node.cli("pin").returncode == 0
    node.start()


def test_another_installation_takes_over(node: Node) -> None:
    """A package's user left the directory, as a pod's does: its registry stays in use."""
    with node.pod("p1") as pod:
        first = node.start()
        pod.create("c1", "1")
        wait_for(lambda: pod.id in node.registered(), "the sandbox recorded")
        first.terminate()
        other = 4242
        for path in (node.runtime_dir, *node.runtime_dir.rglob("*")):
            if path.lstat().st_uid == NOBODY:
                os.chown(path, other, other, follow_symlinks=False)
        os.chmod(node.runtime_dir, 0o750)
        node.start()
        assert pod.id in node.registered()
    for path in (node.runtime_dir, node.runtime_dir / "registry.db", node.runtime_dir / "spool"):
        found = path.stat()
        assert (found.st_uid, found.st_gid) == (NOBODY, NOBODY), path


def test_nothing_else_is_given_away(node: Node) -> None:
    """A directory that the unprivileged user filled makes root touch no file of others."""
    node.runtime_dir.mkdir()
    victim = node.root / "victim"
    victim.write_text("root's own")
    (node.runtime_dir / "registry.db").symlink_to(victim)
    os.link(victim, node.runtime_dir / "registry.db-shm")
    daemon = node.start()
    assert "is left alone" in node.log
    assert "set aside" in node.log
    daemon.terminate()
    (node.runtime_dir / "lock").unlink()
    (node.runtime_dir / "lock").symlink_to(victim)
    node.start()
    assert (victim.stat().st_uid, victim.read_text()) == (0, "root's own")


def test_a_dead_broker_ends_the_daemon(node: Node) -> None:
    """The daemon says why and ends with an error, so that systemd starts both again."""
    node.configure(log_level="info")
    daemon = node.start()
    os.kill(broker_of(daemon.pid), signal.SIGKILL)
    assert daemon.process.wait(10) not in {0, None}
    assert "the privileged broker" in node.log
    assert "ended by signal 9" in node.log
    assert "Traceback" not in node.log
    with node.pod("p1") as pod:
        node.start()
        assert pod.announce().stderr == ""


GIVES_UP = """
import ctypes
from kata_pin.base.config.tree import Config
from kata_pin.service.privileges import give_up
before = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE
give_up(Config())
print(before, ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""


def test_nobody_of_its_user_may_look_into_it() -> None:
    """Started by systemd as its user, which changes no user id, it is as closed as when root's."""
    command = ["setpriv", f"--reuid={NOBODY}", "--clear-groups", sys.executable, "-c", GIVES_UP]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]
