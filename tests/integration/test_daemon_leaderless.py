"""VMMs whose first thread has exited: they are alive while another thread is."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator

import pytest

from kata_pin.rights.broker import threads
from tests.support.daemon import Node, private_node
from tests.support.leaderless import exit_leader, needs_x86
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    needs_x86,
    pytest.mark.skipif(os.cpu_count() == 1, reason="needs two CPUs"),
]

FAST = {"affinity_s": 0.1, "deep_s": 0.5}


@pytest.fixture
def node() -> Iterator[Node]:
    with private_node(new_threads="audit", audit=FAST) as one:
        yield one


def test_a_vmm_without_its_first_thread_stays_pinned(node: Node) -> None:
    """Its other threads are repaired, checked, and seen to end, also by the next daemon."""
    daemon = node.start()
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1")
        pod.wait_placed({1})
        victim = pod.kata.vcpus()[0]
        exit_leader(pod.kata.pid)
        os.sched_setaffinity(victim, {0})
        wait_for(lambda: os.sched_getaffinity(victim) == {1}, "the repair")
        pod.create("c2", "0")
        wait_for(lambda: os.sched_getaffinity(victim) == {0, 1}, "a pass")
        assert json.loads(node.cli("check", "--json").stdout)["sandboxes"] == 1
        daemon.terminate()
        os.sched_setaffinity(victim, {0})
        node.start()
        wait_for(lambda: os.sched_getaffinity(victim) == {0, 1}, "the next daemon")
        assert node.sandboxes()["p1"]["vmm"]["pid"] == pod.kata.pid
        os.kill(pod.kata.pid, signal.SIGKILL)
        wait_for(lambda: "p1" not in node.sandboxes(), "the end to be seen")


def test_a_vmm_without_its_first_thread_is_found(node: Node) -> None:
    """A daemon that has no record of it recognises it by a thread that lives."""
    daemon = node.start()
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1")
        pod.wait_placed({1})
        daemon.terminate()
        (node.runtime_dir / "registry.db").unlink()
        victim = pod.kata.vcpus()[0]
        exit_leader(pod.kata.pid)
        os.sched_setaffinity(victim, {0})
        node.start()
        wait_for(lambda: os.sched_getaffinity(victim) == {1}, "the pin")


def test_descriptors_are_those_of_a_living_thread(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first thread has closed them; the process has not."""
    monkeypatch.setattr(threads, "_KNOWN", re.compile("/dev/null"))
    with node.pod("p1") as pod:
        process = f"/proc/{pod.kata.pid}"
        before = threads.descriptors(process)
        exit_leader(pod.kata.pid)
        assert threads.descriptors(process) == before != []
