"""What hooks and births ask of the broker: for each request the daemon's event loop waits."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest

from kata_pin.engine import sandboxes
from kata_pin.vmm.role_cache import YOUNG_S
from tests.support.counted import Requests, counted
from tests.support.daemon import QUIET, Node, Pod, private_node
from tests.support.qemu import (
    TWENTY,
    TWO_HUNDRED_SIXTY,
    Accelerator,
    Machine,
    accelerator,
    with_one_vcpu,
)
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]

OF_STRANGERS = frozenset({"executable", "executables", "slow-file", "child", "end-child"})
"""Rows that other new processes of the machine cost, too: each is looked at once or twice."""


STRANGERS = 30
"""New processes of root's."""


class Counted(NamedTuple):
    """A node whose daemon's requests are counted."""

    node: Node
    requests: Requests

    def taken(self) -> list[str]:
        """Return the requests since the last call that no stranger can have caused."""
        return [row for row in self.requests.taken() if row not in OF_STRANGERS]


@pytest.fixture
def daemon() -> Iterator[Counted]:
    """A node without audits."""
    with private_node(audit=QUIET) as node:
        file = node.root / "requests"
        node.start(counted(file))
        wait_for(lambda: "process events are available" in node.log, "process events")
        daemon = Counted(node, Requests(file))
        daemon.taken()
        yield daemon


@contextmanager
def _settled(daemon: Counted, machine: Machine) -> Iterator[Pod]:
    """Run a pod none of whose threads is young; nothing that was asked about it is counted."""
    with daemon.node.pod("p1", machine=machine) as pod:
        pod.announce()
        pod.create("c1", "1", exclusive=True)
        time.sleep(YOUNG_S)
        daemon.node.hook("createRuntime", "c1", pod.kata.pid)  # the last look at young threads
        time.sleep(0.2)
        daemon.taken()
        yield pod


def test_a_hook_asks_once(daemon: Counted) -> None:
    """All threads are set by one request; nothing is asked about the VMM or its threads again.

    Kata's state is read once the pins stand, for the guest.
    """
    with _settled(daemon, TWENTY) as pod:
        for number in range(3):
            for tid in pod.kata.tids():
                os.sched_setaffinity(tid, {0, 1})
            daemon.node.hook("createRuntime", "c1", pod.kata.pid)
            asked = daemon.taken()
            assert asked.count("affinities") == 1, number
            assert set(asked) <= {"affinities", "sandbox-state-go"}, number


def test_strangers_are_asked_about_all_at_once(daemon: Counted) -> None:
    """The look for a new sandbox's VMM asks about all new processes, by one request for many.

    The hook itself asks about none of them: by then its VMM is known.
    """
    with ExitStack() as strangers:
        for _ in range(STRANGERS):
            process = strangers.enter_context(subprocess.Popen(["/usr/bin/sleep", "60"]))
            strangers.callback(process.kill)
        daemon.requests.taken()
        with daemon.node.pod("p1", machine=Machine(boot=1)) as pod:
            wait_for(lambda: daemon.node.sandboxes().get("p1", {}).get("vmm"), "the VM to be found")
            asked = daemon.requests.taken()
            assert asked.count("executables") > 0
            assert asked.count("executable") < STRANGERS
            pod.announce()
            assert "executables" not in daemon.requests.taken()


def test_a_container_without_a_vm(daemon: Counted) -> None:
    """It is known as that by its own process; nothing is asked about other processes."""
    requests: list[list[str]] = []
    with subprocess.Popen(["/usr/bin/sleep", "60"]) as process:
        for number in range(3):
            container = f"other{number}"
            daemon.node.bundle(container, {"ociVersion": "1.0.2", "annotations": {}})
            daemon.node.hook("createRuntime", container, process.pid)
            requests.append(daemon.requests.taken())
        process.kill()
    fewest = min(requests, key=len)  # others may have started a VM meanwhile
    assert sorted(fewest) == ["executable", "slow-file", "slow-file"], "its command line, too"


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(Machine(boot=1), id="6 threads"),
        pytest.param(TWENTY, id="20 threads"),
        pytest.param(TWO_HUNDRED_SIXTY, id="260 threads"),
    ],
)
def test_a_birth_asks_about_the_born_thread_alone(daemon: Counted, machine: Machine) -> None:
    """What it inherited is set first; then a request per look tells what it is, whatever the size.

    No other process is looked at, and the main thread is set right by one request more.
    """
    if accelerator() is not Accelerator.KVM:
        pytest.skip("under TCG no thread is asked about")
    with _settled(daemon, machine) as pod:
        os.sched_setaffinity(pod.kata.pid, {0, 1})
        before = set(pod.kata.tids())
        pod.kata.shim.execute("object-add", **{"qom-type": "iothread", "id": "late"})
        (tid,) = set(pod.kata.tids()) - before
        wait_for(lambda: os.sched_getaffinity(tid) == {1}, "the new thread to be pinned")
        wait_for(lambda: os.sched_getaffinity(pod.kata.pid) == {1}, "the main thread to be pinned")
        time.sleep(YOUNG_S)  # until then it may turn out to be a vCPU
        first, *asked = daemon.taken()
        assert first == "affinities"
        assert asked.count("affinities") == 1
        assert 0 < asked.count("system-calls") <= 5 * len(sandboxes.YOUNG_S)
        assert set(asked) <= {"affinities", "system-calls", "sandbox-state-go"}
        assert asked.count("sandbox-state-go") <= 1, "for the guest, once the pins stand"


@pytest.mark.parametrize("threads", [6, 20, 260])
def test_a_hotplugged_vcpu_is_asked_about_alone(daemon: Counted, threads: int) -> None:
    """It is paired by one request, once a look has shown what it is, whatever the size."""
    if accelerator() is not Accelerator.KVM:
        pytest.skip("under TCG no thread is asked about")
    with _settled(daemon, with_one_vcpu(threads)) as pod:
        pod.create("c2", "0", exclusive=True)
        before = set(pod.kata.tids())
        daemon.taken()
        pod.kata.shim.plug(1)
        (tid,) = set(pod.kata.tids()) - before
        wait_for(lambda: len(os.sched_getaffinity(tid)) == 1, "the new vCPU to be paired")
        asked = daemon.taken()
        assert asked.count("affinities") == 1
        assert 0 < asked.count("system-calls") <= len(sandboxes.YOUNG_S)
        # debugfs is asked about one that is seen running twice
        assert set(asked) <= {"affinities", "system-calls", "kvm-vcpus", "sandbox-state-go"}
