"""The hook against the real daemon, absent, hung, busy or unable to write: nothing is lost."""

from __future__ import annotations

import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.daemon import Node
from tests.support.hooks import HookRun
from tests.support.qemu import Machine
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]

SMALL = Machine(boot=2, maximum=2)
BUDGETS = ("--record-ms=250", "--pin-ms=200")
BUDGET_S = 0.25 + 0.2
BUSY_S = 3.0  # what a loaded machine may add to a hook's own time


def _make_runtime_dir(node: Node) -> None:
    (node.runtime_dir / "spool").mkdir(parents=True, mode=0o700)


def test_spooled_without_a_daemon_and_taken_in_at_start(node: Node) -> None:
    """With no daemon all hooks spool; the start takes them in, in their order, and pins."""
    _make_runtime_dir(node)
    with node.pod("p1", machine=SMALL) as pod:
        assert "spooled" in pod.announce().stderr
        for number in range(8):
            assert "spooled" in pod.create(f"c{number}", "0" if number else "1").stderr
        for number in range(1, 8):
            pod.stop(f"c{number}")
        assert len(node.spooled()) == 16
        node.start()
        pod.wait_placed({1})
        wait_for(lambda: not node.spooled(), "the spool to be taken in")
        registered = node.registered()
        assert [one for one in registered if registered[one].counts] == [pod.id, "c0"]


@pytest.mark.alone
def test_a_hung_daemon_counts_a_message_once(node: Node) -> None:
    """A stopped daemon makes the hook spool in budget; when it goes on, the message counts once."""
    node.configure(log_level="debug")  # to see the second of each, by whichever way it comes
    daemon = node.start()
    with node.pod("p1", machine=SMALL) as pod:
        pod.announce()
        with daemon.hung():
            run = pod.create("c1", "1", *BUDGETS)
            assert "spooled, not recorded" in run.stderr
            assert run.seconds < BUDGET_S + BUSY_S
            pod.write_bundle("c2", "0")
            node.hook("createRuntime", "c2", pod.kata.pid, *BUDGETS)
            pod.stop("c2", *BUDGETS)
        pod.wait_placed({1})
        wait_for(lambda: not node.spooled(), "the spool to be taken in")
        registered = node.registered()
        assert registered["c1"].counts
        assert "c2" not in registered or not registered["c2"].counts
        wait_for(lambda: "a newer message is recorded" in node.log, "the same by the other way")


@pytest.mark.alone
def test_200_hooks_at_once_are_all_recorded(node: Node) -> None:
    """Of 200 hooks at once each is acknowledged or spooled, and all are in the registry."""
    node.start()
    with node.pod("p1", machine=SMALL) as pod:
        pod.announce()
        names = [f"c{number}" for number in range(200)]
        for name in names:
            pod.write_bundle(name, "1")

        def one(name: str) -> HookRun:
            return node.hook("createRuntime", name, pod.kata.pid, *BUDGETS)

        with ThreadPoolExecutor(200) as pool:
            runs = list(pool.map(one, names))
        assert {run.status for run in runs} == {0}
        assert not [run.stderr for run in runs if "neither" in run.stderr]
        spooled = sum("spooled" in run.stderr for run in runs)
        print(f"{spooled} of 200 spooled, slowest {max(run.seconds for run in runs):.2f} s")
        wait_for(lambda: not node.spooled(), "the spool to be taken in")
        assert node.registered().keys() == {pod.id, *names}
        pod.wait_placed({1})


def test_rubbish_in_the_spool_is_set_aside(node: Node) -> None:
    """Garbage, foreign and huge files, symlinks, folders and fifos neither stop nor mislead it."""
    _make_runtime_dir(node)
    spool = node.runtime_dir / "spool"
    with node.pod("p1", machine=SMALL) as pod:
        pod.write_bundle("c1", "1")
        node.hook("createRuntime", "c1", pod.kata.pid)
        real = node.spooled()[0]
        (spool / "1-1.msg").write_bytes(b"garbage")
        (spool / "2-2.msg").write_bytes(b"KP1 createRuntime 2 2 9\n{not json")
        (spool / "3-3.msg").symlink_to("/etc/shadow")
        (spool / "4-4.msg").mkdir()
        os.mkfifo(spool / "5-5.msg")
        with (spool / "6-6.msg").open("wb") as huge:
            huge.truncate(1 << 33)
        (spool / "7-7.msg").write_bytes(real.read_bytes())  # not under its own name
        (spool / "foreign.txt").write_text("x")
        (spool / "8-8.msg.tmp").write_text("unfinished")
        (spool / "9-9.msg").write_bytes(_of_future(real.read_bytes()))
        other = spool / "10-10.msg"
        other.write_bytes(_message(10, 10, {"bundle": "/nonexistent/../etc", "id": "x/y"}))
        os.chown(other, 65534, 65534)  # not root's
        daemon = node.start()
        pod.wait_placed({1})
        wait_for(lambda: not node.spooled(), "the spool to be taken in")
        assert node.registered().keys() == {pod.id, "c1"}
        assert daemon.process.poll() is None
        kept = {path.name for path in (spool / "bad").iterdir()}
        assert {"1-1.msg", "3-3.msg", "5-5.msg", "6-6.msg"} <= kept
        pod.write_bundle("c2", "0")
        assert node.hook("createRuntime", "c2", pod.kata.pid).stderr == ""


def _message(stamp: int, pid: int, state: dict[str, object]) -> bytes:
    body = json.dumps(state).encode()
    return b"KP1 createRuntime %d %d %d\n" % (stamp, pid, len(body)) + body


def _of_future(request: bytes) -> bytes:
    header, _, body = request.partition(b"\n")
    words = header.split()
    return b" ".join([*words[:2], b"9", b"9", words[4]]) + b"\n" + body


def test_a_spool_that_goes_away_comes_back(node: Node) -> None:
    """A spool that is deleted under the daemon is made anew, and messages in it are taken."""
    daemon = node.start()
    with node.pod("p1", machine=SMALL) as pod:
        pod.announce()
        spool = node.runtime_dir / "spool"
        spool.rmdir()
        wait_for(spool.is_dir, "the spool to be made anew")
        assert stat.S_IMODE(spool.stat().st_mode) == 0o700
        with daemon.hung():
            assert "spooled" in pod.create("c1", "1", "--record-ms=50").stderr
        pod.wait_placed({1})
        wait_for(lambda: not node.spooled(), "the spool to be taken in")


@pytest.mark.alone
def test_a_hook_that_vanishes_does_not_hold_anything_up(node: Node) -> None:
    """Connections that are cut at any point leave the daemon serving the next ones at once."""
    import socket

    node.start()
    with node.pod("p1", machine=SMALL) as pod:
        pod.write_bundle(pod.id, kind="sandbox")
        state = {"id": pod.id, "pid": pod.kata.pid, "bundle": str(node.dirs.bundles / pod.id)}
        stamp = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        request = _message(stamp, 77, {**state, "ociVersion": "", "status": ""})
        for length in (0, 3, 20, len(request) - 1, len(request)):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(node.runtime_dir / "hook.sock"))
                peer.sendall(request[:length])
        started = time.monotonic()
        assert pod.create("c1", "1").stderr == ""
        assert time.monotonic() - started < BUSY_S
        assert pod.kata.shim.execute("query-status")["running"]
