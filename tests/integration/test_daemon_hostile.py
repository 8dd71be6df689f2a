"""Lies and traps on the way from a hook to a thread: only the sandbox's own threads are set."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Node
from tests.support.katalike import ContainerSpec, KataDirs, KataSandbox
from tests.support.qemu import QEMU, Machine
from tests.support.vmmhost import Bystander, lookalike
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]

SMALL = Machine(boot=2, maximum=2)
EVERYWHERE = os.sched_getaffinity(0)


@contextmanager
def liar(node: Node, name: str) -> Iterator[Bystander]:
    """Run a process that calls itself the QEMU of a sandbox and must never be touched."""
    with lookalike("-name", f"sandbox-{node.id_of(name)}", "-smp", "2") as process:
        bystander = Bystander(process.pid)
        yield bystander
        bystander.check()


def _container(node: Node, name: str, sandbox: str, cpus: str, **state: Any) -> None:
    annotations = {
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.sandbox-id": sandbox,
    }
    linux = {"resources": {"cpu": {"cpus": cpus, "shares": 102}}}
    node.bundle(name, {"annotations": annotations, "linux": linux, **state})


def test_files_and_hooks_that_name_a_bystander(node: Node) -> None:
    """Hook, pid file and persist.json naming a lookalike: refused with reasons, never touched.

    Its executable is the administrator's to allow: what is recorded stays, over a restart too.
    """
    daemon = node.start()
    with liar(node, "p1") as bystander:
        sandbox = node.id_of("p1")
        kata = KataSandbox(node.dirs, sandbox)
        for folder in (kata.vm_dir, kata.persist_path.parent):
            folder.mkdir(parents=True)
        kata.pidfile.write_text(f"{bystander.pid}\n")
        kata.pid = bystander.pid
        kata.write_persist([ContainerSpec("c1", cpus="1")])
        kata.pid = 0  # it is not to be ended
        _container(node, "c1", sandbox, "1")
        said = node.hook("createRuntime", "c1", bystander.pid).stderr
        assert "unpinned" in said
        assert "is not on the allow-list" in said
        node.ask("reconcile")
        bystander.check()
        assert node.sandboxes()["p1"]["state"] == "no-vmm"
        assert node.sandboxes()["p1"]["threads"] == []
        daemon.kill()
        node.start()
        node.wait_state("p1", "no-vmm")
        assert node.registered()["c1"].cpus == "1"


def test_a_hook_that_names_another_sandboxes_vmm(node: Node) -> None:
    """A pid of another sandbox's real QEMU, in hook and files, is refused: its -name differs."""
    node.start()
    with node.pod("p1", machine=SMALL) as pod:
        pod.announce()
        pod.create("c1", "0")
        thief = KataSandbox(node.dirs, node.id_of("p2"))
        thief.persist_path.parent.mkdir(parents=True)
        thief.pid = pod.kata.pid
        thief.write_persist([ContainerSpec("c2", cpus="1")])
        thief.pid = 0
        _container(node, "c2", thief.id, "1")
        said = node.hook("createRuntime", "c2", pod.kata.pid, "--pin-ms=5000").stderr
        assert f"its command line names {pod.id}" in said
        shown = node.wait_state("p2", "no-vmm")
        assert f"its command line names {pod.id}" in shown["vmm_problem"]
        assert pod.misplaced({0}) == []
        assert node.sandboxes()["p1"]["state"] == "ok"


def test_a_claim_alone_is_not_adopted(node: Node) -> None:
    """A real QEMU that only its own command line places in a sandbox is left alone."""
    node.configure(audit={"affinity_s": 0.1, "deep_s": 0.1})
    elsewhere = KataDirs.below(node.root / "x")
    with KataSandbox(elsewhere, node.id_of("p1"), machine=SMALL, shim_process=False) as kata:
        own = KataSandbox(node.dirs, kata.id)
        own.persist_path.parent.mkdir(parents=True)
        own.pid = 1
        own.write_persist([ContainerSpec("c1", cpus="1")])
        own.pid = 0
        node.start()
        node.ask("reconcile")
        wait_for(lambda: node.ask("state"), "a document")
        assert node.sandboxes() == {}
        assert {frozenset(os.sched_getaffinity(tid)) for tid in kata.tids()} == {
            frozenset(EVERYWHERE)
        }


def test_names_full_of_traps(node: Node) -> None:
    """A VMM called `) R 1 (`, with newlines and escape codes, is parsed, pinned, shown safely."""
    node.start()
    trap = ") R 1 (\n\x1b[31m"
    machine = Machine(boot=2, maximum=2, extra=("-name", f"process={trap}"))
    with node.pod("p1", machine=machine) as pod:
        assert trap in Path(f"/proc/{pod.kata.pid}/comm").read_text()
        pod.announce()
        pod.create("c1", "1", exclusive=True)
        pod.create("c2", "0")
        pod.wait_placed({0}, {1: 1})
        for command in (("show",), ("show", pod.id), ("who", "1"), ("explain", pod.id)):
            done = node.cli(*command)
            assert done.returncode == 0, done.stderr
            assert "\x1b" not in done.stdout


_CROWD = """
import sys, threading, time
threading.stack_size(65536)
for _ in range(int(sys.argv[1])):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
while sys.argv[2] != "0":
    threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()
    time.sleep(float(sys.argv[2]))
sys.stdin.read()
"""


_STORM = """
import sys, threading
print("ready", flush=True)
while True:
    several = [threading.Thread(target=int) for _ in range(20)]
    for one in several:
        one.start()
    for one in several:
        one.join()
"""


@contextmanager
def believed(node: Node, name: str, program: str, *arguments: str) -> Iterator[int]:
    """Run a VMM that is believed, and does what a program in Python says; return its pid."""
    executable = node.root / "qemu-system-crowd"
    shutil.copy(os.path.realpath(sys.executable), executable)
    argv = ["nice", str(executable), "-c", program, *arguments]
    with subprocess.Popen(
        [*argv, "-name", f"sandbox-{node.id_of(name)}", "-smp", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "PYTHONHOME": sys.base_prefix},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


@pytest.mark.alone
def test_a_vmm_with_thousands_of_threads(node: Node) -> None:
    """5,000 threads in one VMM all get the mask, and other sandboxes' hooks stay in budget."""
    node.configure(hypervisors=[QEMU, str(node.root / "qemu-system-crowd")])
    node.start()
    with node.pod("p1", machine=SMALL) as pod, believed(node, "p2", _CROWD, "5000", "0") as pid:
        pod.announce()
        _container(node, "c2", node.id_of("p2"), "1")
        node.hook("createRuntime", "c2", pid, "--pin-ms=100")
        tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        wait_for(
            lambda: all(os.sched_getaffinity(tid) == {1} for tid in tids), "the crowd's pins", 30
        )
        shown = node.wait_state("p2", "ok")
        assert len(shown["threads"]) == 5001
        run = pod.create("c1", "1", "--record-ms=1000", "--pin-ms=1000")
        assert run.stderr == ""
        assert len(node.ask("state")["sandboxes"]) >= 2
        assert node.cli("check").returncode in {0, 3}


@pytest.mark.alone
def test_births_in_a_crowd_do_not_starve_others(node: Node) -> None:
    """2,000 threads, and another one every 5 ms: passes over it pause, and it rests in between.

    That is seen in the daemon's own CPU time (it was all of a CPU) and in how often others' hooks
    are late. The full size is in scripts/chaos.
    """
    node.configure(hypervisors=[QEMU, str(node.root / "qemu-system-crowd")], log_level="info")
    daemon = node.start()
    with node.pod("p1", machine=SMALL) as pod, believed(node, "p2", _CROWD, "2000", "0.005") as pid:
        pod.announce()
        _container(node, "crowd", node.id_of("p2"), "0")
        node.hook("createRuntime", "crowd", pid)
        started, before = time.monotonic(), cpu_seconds(daemon.pid)
        for number in range(10):
            run = pod.create(f"c{number}", "1", "--record-ms=1000", "--pin-ms=1000")
            assert run.stderr == ""
            time.sleep(0.3)
        used = cpu_seconds(daemon.pid) - before
        assert used < 0.6 * (time.monotonic() - started)
        assert pod.misplaced({1}) == []
        wait_for(lambda: _all_on(pid, {0}), "the crowd's pins", 30)


def _all_on(pid: int, cpus: set[int]) -> bool:
    """Whether all threads that live longer than an instant are there."""
    elsewhere = []
    for name in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            elsewhere += [name] if os.sched_getaffinity(int(name)) != cpus else []
    return not elsewhere


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.alone
def test_a_storm_of_threads_does_not_starve_others(node: Node) -> None:
    """While one VMM's threads come and go without end, another sandbox is pinned in budget."""
    node.configure(hypervisors=[QEMU, str(node.root / "qemu-system-crowd")])
    node.start()
    with node.pod("p1", machine=SMALL) as pod, believed(node, "p2", _STORM) as pid:
        pod.announce()
        _container(node, "c2", node.id_of("p2"), "0")
        node.hook("createRuntime", "c2", pid, "--pin-ms=100")
        for number in range(10):
            run = pod.create(f"c{number}", "1", "--record-ms=1000", "--pin-ms=1000")
            assert run.stderr == ""
            assert pod.misplaced({1}) == []
        started = time.monotonic()
        node.ask("ping")
        assert time.monotonic() - started < 0.5


@pytest.mark.alone
def test_qmp_taken_in_the_window_is_given_back(node: Node) -> None:
    """A QEMU that greets and then says nothing costs the hook its budget at most, not the pins."""
    node.configure(qmp={"greeting_ms": 50, "session_ms": 120})
    node.start()
    with node.pod("p1", machine=SMALL) as pod:
        pod.kata.shim.let_go()
        pod.kata.qmp_path.unlink()
        with mute_qmp(pod.kata.qmp_path) as closed:
            pod.write_bundle(pod.id, kind="sandbox")
            run = node.hook("createRuntime", pod.id, pod.kata.pid)
            assert run.stderr == ""
            assert run.seconds < 1
            wait_for(closed.is_set, "the session to be closed", 2)
        pod.create("c1", "1")
        pod.wait_placed({1})


@contextmanager
def mute_qmp(path: Path) -> Iterator[threading.Event]:
    """Listen as QEMU would, greet, and never answer; tell when the client has gone."""
    closed = threading.Event()
    greeting = {"QMP": {"version": {"qemu": {"major": 7}, "package": ""}, "capabilities": []}}

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            peer, _ = listener.accept()
            with peer:
                peer.sendall(json.dumps(greeting).encode() + b"\r\n")
                while peer.recv(4096):
                    continue
                closed.set()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(10)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield closed
        finally:
            thread.join(10)
