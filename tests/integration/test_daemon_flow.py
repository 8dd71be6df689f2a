"""The main flow on real parts: hooks recorded, threads found, pinned, followed and forgotten."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.daemon import Json, Node, private_node
from tests.support.qemu import Accelerator, Machine
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]

CONNECTED = "03"
"""State of a connected socket in /proc/net/unix."""


def _by_tid(shown: Json) -> dict[int, Json]:
    return {thread["tid"]: thread for thread in shown["threads"]}


@pytest.mark.alone
def test_pins_stand_when_the_hook_returns(node: Node) -> None:
    """Sandbox and container hooks end with every thread pinned, roles from QMP, and it is shown."""
    node.start()
    with node.pod("p1") as pod:
        announced = pod.announce()
        created = pod.create("c1", "1", exclusive=True)
        assert (announced.stderr, created.stderr) == ("", "")  # recorded and pinned
        pod.create("c2", "0")
        assert pod.misplaced({0}, {1: 1}) == []
        shown = node.wait_state("p1", "ok")
        assert (shown["mask"], shown["exclusive"], shown["shared"]) == ("0-1", "1", "0")
        assert [one["id"] for one in shown["containers"]] == [pod.id, "c1", "c2"]
        threads = _by_tid(shown)
        assert set(threads) >= set(pod.kata.tids())
        for index, tid in pod.kata.vcpus().items():
            assert (threads[tid]["vcpu"], threads[tid]["source"]) == (index, "qmp")
        for name, tid in pod.kata.iothreads().items():
            assert threads[tid]["iothread"] == name
        assert shown["vmm"]["pid"] == pod.kata.pid


def test_an_exit_that_no_event_reports() -> None:
    """Without process events and before any audit the daemon waits for the VMM's end itself."""
    with private_node(new_threads="audit") as node:
        node.start()
        with node.pod("p1") as pod:
            pod.announce()
            pod.create("c1", "1")
            os.kill(pod.kata.pid, signal.SIGKILL)
            wait_for(lambda: not node.sandboxes(), "the sandbox to be forgotten")


def test_hotplugged_vcpu_is_pinned_by_its_birth(node: Node) -> None:
    """With no audit at all, vCPUs plugged later are pinned because their threads were born."""
    node.start()
    with node.pod("p1", machine=Machine(boot=1, maximum=4)) as pod:
        pod.announce()
        pod.create("c1", "1", exclusive=True)
        pod.create("c2", "0")
        pod.wait_placed({0}, {0: 1})
        pod.kata.shim.plug(2)
        assert len(pod.kata.vcpus()) == 3
        node.wait_state("p1", "ok")
        wait_for(
            lambda: set(_by_tid(node.sandboxes()["p1"])) >= set(pod.kata.tids()),
            "the new threads to be shown",
        )
        shown = node.sandboxes()["p1"]
        paired = [t for t in shown["threads"] if t["paired"]]
        assert [t["desired"] for t in paired] == ["1"]  # never two vCPUs on one exclusive pCPU
        for tid in pod.kata.tids():
            assert _by_tid(shown)[tid]["expected"] == _cpus(tid)


def test_under_tcg_too(node: Node) -> None:
    """Without KVM the window's QMP answers name the vCPU threads, and they are paired."""
    node.start()
    with node.pod("p1", accelerator=Accelerator.TCG) as pod:
        pod.announce()
        pod.create("c1", "1", exclusive=True)
        pod.create("c2", "0")
        pod.wait_placed({0}, {1: 1})


@pytest.mark.alone
def test_the_qmp_slot_is_never_taken(node: Node) -> None:
    """With qmp.sock held, hooks are answered at once, nobody waits behind it, and it stays free."""
    node.start()
    with node.pod("p1") as pod:
        pod.write_bundle(pod.id, kind="sandbox")
        run = node.hook(
            "createRuntime", pod.id, pod.kata.pid
        )  # the shim holds the socket meanwhile
        assert run.stderr == ""
        assert run.seconds < 0.5
        assert _clients(pod.kata.qmp_path) == 1
        assert pod.kata.shim.execute("query-status")["running"]
        pod.create("c1", "1")
        pod.wait_placed({1})
        for _ in range(5):  # whoever waited would now get the greeting in the shim's place
            pod.kata.shim.let_go()
            wait_for(lambda: not _clients(pod.kata.qmp_path), "the socket to be free")
            pod.kata.shim.hold()


def test_adopted_without_any_hook(node: Node) -> None:
    """A sandbox that ran before the daemon is found, believed and pinned from Kata's state."""
    with node.pod("p1") as pod:
        pod.persist("c1", "1")
        node.start()
        pod.wait_placed({1})
        assert node.wait_state("p1", "ok")["vmm"]["pid"] == pod.kata.pid


def test_pin_without_the_daemon_gains_no_exclusive_cpu(node: Node) -> None:
    """What the daemon stored keeps overhead off the pairs, and other sandboxes off both."""
    daemon = node.start()
    with node.pod("p1") as pod, node.pod("p2") as other:
        pod.announce()
        pod.create("c1", "1", exclusive=True)
        pod.create("c2", "0")
        pod.wait_placed({0}, {1: 1})
        other.announce()
        other.create("c3", "0-1")
        other.wait_placed({0, 1})
        daemon.kill()
        for tid in other.kata.tids():
            os.sched_setaffinity(tid, {0})
        done = node.cli("pin")
        assert done.returncode == 0, done.stderr
        assert "kept off pCPUs" in done.stdout
        assert pod.misplaced({0}, {1: 1}) == []
        assert other.misplaced({0}) == []
        for sandbox in _shown(node)["sandboxes"]:
            assert "drift" not in {one["state"] for one in sandbox["threads"]}
        node.start()
        other.wait_placed({0, 1})


def test_commands_agree_without_the_daemon(node: Node) -> None:
    """show, explain, check, pin and unpin work alone, and tell what the daemon told."""
    daemon = node.start()
    everywhere = os.sched_getaffinity(0)
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1", exclusive=True)
        pod.create("c2", "0")
        by_daemon = _shown(node)
        explained = node.cli("explain", pod.id).stdout
        assert daemon.terminate() == 0
        alone = _shown(node)
        assert alone["sandboxes"] == by_daemon["sandboxes"]
        assert (by_daemon["daemon"]["running"], alone["daemon"]["running"]) == (True, False)
        assert len(explained.splitlines()) > 5
        assert node.cli("explain", pod.id).stdout.splitlines()[0] == explained.splitlines()[0]
        assert node.cli("check", "--for", "0s").returncode == 4
        os.sched_setaffinity(pod.kata.pid, {1})
        assert node.cli("check", "--for", "0s").returncode == 3
        assert node.cli("pin").returncode == 0
        others = [line for line in pod.misplaced({0}, {1: 1}) if str(pod.kata.pid) not in line]
        assert others == []
        main = os.sched_getaffinity(pod.kata.pid)
        assert main == {0, 1}  # without events it keeps the mask: what is born inherits it
        assert node.cli("check", "--for", "0s").returncode == 4
        assert node.cli("unpin", pod.id).returncode == 0
        assert pod.misplaced(everywhere) == []
        node.start()
        assert node.wait_state("p1", "released")


@pytest.mark.alone
def test_containers_of_other_runtimes_leave_nothing(node: Node) -> None:
    """A container with no VMM behind it (CRI-O's `always`) is answered at once and dropped."""
    node.start()
    pid = os.getpid()  # what runc's hooks tell: a process of the container
    annotations = {
        "io.kubernetes.cri-o.ContainerType": "container",
        "io.kubernetes.cri-o.SandboxID": node.id_of("other"),
    }
    cpu = {"cpus": "1", "quota": 100000, "period": 100000}
    config = {"annotations": annotations, "linux": {"resources": {"cpu": cpu}}}
    node.bundle("other", config)
    before = os.sched_getaffinity(0)
    run = node.hook("createRuntime", "other", pid)
    assert (run.status, run.stderr) == (0, "")
    assert run.seconds < 0.5
    assert node.sandboxes() == {}
    assert node.registered() == {}
    assert node.hook("poststart", "other", pid).stderr == ""
    assert node.hook("poststop", "other", pid).stderr == ""
    wait_for(lambda: not node.sandboxes() and not node.registered(), "nothing to be left")
    assert os.sched_getaffinity(0) == before


def _shown(node: Node) -> Json:
    """Return `show --json` without what differs from one moment to the next."""
    document: Json = json.loads(node.cli("show", "--json").stdout)
    document["sandboxes"] = list(node.by_name(document).values())
    for sandbox in document["sandboxes"]:
        for key in ("checked_s", "duration_ms"):
            del sandbox[key]
        for one in sandbox["containers"]:
            for key in ("recorded_s", "cpusets", "cpusets_reason"):  # events may be on their way
                del one[key]
        for thread in sandbox["threads"]:
            for key in ("last_cpu", "cpu_ticks", "source", "apic_id"):
                del thread[key]  # QMP told the daemon; the command must look at the kernel
        guest = sandbox["guest"]  # only the daemon asks it
        sandbox["guest"] = [
            *((one["tid"], one["guest_cpu"], one["container"]) for one in guest["vcpus"]),
            *((one["id"], one["cpus"], one["reason"]) for one in guest["containers"]),
        ]
    return document


def _clients(socket_path: Path) -> int:
    """Return how many clients are connected to a unix socket, or wait to be."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.split()[5] in {"02", CONNECTED} for line in lines if str(socket_path) in line)


def _cpus(tid: int) -> str:
    from kata_pin.base.cpuset import CpuSet

    return str(CpuSet(os.sched_getaffinity(tid)))
