"""Starts and ends: what is left behind, what is found again, who may serve."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.daemon import PROGRAM, Node
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]


def test_sigterm_ends_soon_and_leaves_the_pins(node: Node) -> None:
    """SIGTERM ends the daemon within two seconds; sockets go, masks, registry and spool stay."""
    daemon = node.start()
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1")
        asked = time.monotonic()
        assert daemon.terminate() == 0
        assert time.monotonic() - asked < 2
        assert pod.misplaced({1}) == []
        left = {path.name.partition("-")[0] for path in node.runtime_dir.iterdir()}
        assert left <= {"lock", "registry.db", "spool", "free"}  # free-cpus: hooks still need it
        assert node.registered().keys() == {pod.id, "c1"}


def test_sigterm_at_any_moment_leaves_no_socket(node: Node) -> None:
    """However early SIGTERM comes in a start, the daemon ends and leaves no socket."""
    for step in range(12):
        daemon = node.start(ready=False)
        appeared = ("lock", "registry.db", "hook.sock", "control.sock", "status.sock")[step % 5]
        path = node.runtime_dir / appeared
        wait_for(lambda path=path: path.exists(), appeared)  # type: ignore[misc]
        daemon.process.terminate()
        assert daemon.process.wait(5) in {0, -15}, node.log
        assert list(node.runtime_dir.glob("*.sock*")) == []
    assert "Traceback" not in node.log


def test_restart_repairs_what_moved_meanwhile(node: Node) -> None:
    """Pins moved while no daemon ran are put back at its start, pairs as they were."""
    daemon = node.start()
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1", exclusive=True)
        pod.create("c2", "0")
        daemon.kill()
        for tid in pod.kata.tids():
            os.sched_setaffinity(tid, {0, 1})
        node.start()
        pod.wait_placed({0}, {1: 1})


def _damage(path: Path) -> None:
    path.write_bytes(b"\0garbage" * 1000)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _sql(statement: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(statement)

    return change


@pytest.mark.parametrize(
    ("spoil", "label"),
    [
        pytest.param(_damage, "damaged", id="garbage"),
        pytest.param(_cut, "damaged", id="cut"),
        (_sql("UPDATE meta SET value = '99' WHERE key = 'version'"), "version"),
        (_sql("UPDATE meta SET value = '99' WHERE key = 'boot_id'"), "boot"),
        (_sql("UPDATE containers SET cpus = 'x-y' WHERE id = 'c1'"), "damaged"),
        (_sql("UPDATE containers SET name = x'00ff'"), "damaged"),  # bytes for text
        (_sql("UPDATE containers SET pid_hint = 'x'"), "damaged"),
        (_sql("INSERT INTO vmms VALUES ('a', 1, x'01', 1)"), "damaged"),
    ],
)
def test_a_registry_that_cannot_be_used_is_set_aside(
    node: Node, spoil: Callable[[Path], None], label: str
) -> None:
    """The daemon starts anyway, says where the file went, and adopts what runs."""
    daemon = node.start()
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1")
        assert daemon.terminate() == 0
        spoil(node.runtime_dir / "registry.db")
        for tid in pod.kata.tids():
            os.sched_setaffinity(tid, {0, 1})
        node.start()
        pod.wait_placed({1})
        aside = list(node.runtime_dir.glob(f"registry.db.{label}-*"))
        assert len([path for path in aside if path.name[-1].isdigit()]) == 1
        assert str(aside[0]).removesuffix("-wal").removesuffix("-shm") in node.log
        wait_for(lambda: "c1" in node.registered(), "Kata's state to be taken in")


def test_an_orphan_is_adopted_and_shown(node: Node) -> None:
    """QEMU whose shim was killed is still pinned after a restart, and shown as an orphan."""
    daemon = node.start()
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1")
        daemon.kill()
        pod.kata.orphan()
        for tid in pod.kata.tids():
            os.sched_setaffinity(tid, {0, 1})
        node.start()
        pod.wait_placed({1})
        vmm = node.wait_state("p1", "ok")["vmm"]
        assert (vmm["pid"], vmm["orphan"]) == (pod.kata.pid, True)


def test_a_shim_that_dies_under_the_daemon_makes_an_orphan(node: Node) -> None:
    """The next look after the shim's death says so, without a restart."""
    node.start()
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1")
        assert not node.sandboxes()["p1"]["vmm"]["orphan"]
        pod.kata.orphan()
        node.ask("reconcile")
        assert node.sandboxes()["p1"]["vmm"]["orphan"]
        assert pod.misplaced({1}) == []


def test_a_sandbox_that_ended_meanwhile_is_forgotten(node: Node) -> None:
    """Records of a VMM that exited while no daemon ran do not stay."""
    daemon = node.start()
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1")
        daemon.kill()
    node.start()
    wait_for(lambda: not node.registered(), "the records to go")
    assert node.sandboxes() == {}


def test_two_daemons_do_not_serve_one_directory(node: Node) -> None:
    """The second says so and ends; the first is not disturbed, and no socket is taken from it."""
    first = node.start()
    sockets = {path.name: path.stat().st_ino for path in node.runtime_dir.glob("*.sock")}
    second = node.cli("run")
    assert second.returncode == 1
    said = f"another kata-pin serves {node.runtime_dir} (process {first.pid}"
    assert said in second.stderr
    assert "Traceback" not in second.stderr
    assert {p.name: p.stat().st_ino for p in node.runtime_dir.glob("*.sock")} == sockets
    assert node.ask("state")["daemon"]["pid"] == first.pid


def test_two_daemons_do_not_serve_one_node(node: Node) -> None:
    """Whatever its runtime directory, a second one would undo the pins of the first."""
    first = node.start()
    node.configure(runtime_dir=str(node.root / "other"))
    for arguments in (["run"], ["pin"], ["unpin"]):
        second = node.cli(*arguments)
        assert second.returncode == 1
        assert "another kata-pin runs on this node: it holds " in second.stderr
    node.configure()
    assert node.ask("state")["daemon"]["pid"] == first.pid


def test_a_locked_file_of_another_user_is_not_set_aside(node: Node) -> None:
    """Whatever holds the lock may be a kata-pin: two must never run."""
    node.runtime_dir.mkdir()
    lock = node.runtime_dir / "lock"
    lock.write_text("")
    os.chown(lock, 4242, 4242)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = node.cli("run")
    assert (done.returncode, "another kata-pin serves" in done.stderr) == (1, True)
    assert lock.stat().st_uid == 4242
    node.start()
    assert lock.stat().st_uid != 4242


def test_watchdog_is_fed_while_the_loop_turns(node: Node) -> None:
    """With WATCHDOG_USEC set, WATCHDOG=1 arrives at half the period."""
    # the unit has 30 s; a tenth of a second tells the same
    with (node.root / "daemon.log").open("ab") as log:
        environment = {
            "PATH": os.environ["PATH"],
            "NOTIFY_SOCKET": str(node.root / "notify"),
            "WATCHDOG_USEC": "100000",
        }
        process = subprocess.Popen(
            [str(PROGRAM), "--config", str(node.config), "run"], env=environment, stderr=log
        )
        try:
            node.notify.settimeout(10)
            messages = [node.notify.recv(4096) for _ in range(8)]
            assert messages[0].startswith(b"READY=1")
            assert sum(one.split(b"\n")[0] == b"WATCHDOG=1" for one in messages) >= 3
        finally:
            process.terminate()
            assert process.wait(5) == 0
        node.notify.settimeout(0)
        ends = []
        try:
            while True:
                ends.append(node.notify.recv(4096))
        except BlockingIOError:
            assert b"STOPPING=1" in ends
