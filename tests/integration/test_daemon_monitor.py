"""Kata's extra monitor: where it is on, QEMU names its threads at any time (D6)."""

from __future__ import annotations

import pytest

from tests.support.daemon import Json, Node
from tests.support.qemu import Accelerator, Machine
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]


def _by_tid(shown: Json) -> dict[int, Json]:
    return {thread["tid"]: thread for thread in shown["threads"]}


def test_threads_are_named_outside_of_katas_window(node: Node) -> None:
    """With qmp.sock held all the time, under TCG: iothreads, boot vCPUs and a later one too."""
    node.start()
    machine = Machine(boot=1, maximum=4)
    with node.pod("p1", machine=machine, accelerator=Accelerator.TCG, extra_monitor=True) as pod:
        assert pod.create("c1", "1").stderr == ""
        threads = _by_tid(node.wait_state("p1", "ok"))
        for name, tid in pod.kata.iothreads().items():
            assert (threads[tid]["iothread"], threads[tid]["source"]) == (name, "qmp")
        pod.kata.shim.plug(1)
        vcpus = pod.kata.vcpus()
        assert len(vcpus) == 2

        def named() -> bool:
            shown = _by_tid(node.sandboxes()["p1"])
            return all(tid in shown and shown[tid]["vcpu"] == n for n, tid in vcpus.items())

        wait_for(named, "both vCPUs to be named")


@pytest.mark.parametrize("accelerator", [Accelerator.KVM, Accelerator.TCG])
def test_the_monitors_own_thread_is_told_from_iothreads(
    node: Node, accelerator: Accelerator
) -> None:
    """Where QEMU names no thread, its answer leaves nothing to creation order."""
    node.start()
    with node.pod("p1", accelerator=accelerator, extra_monitor=True) as pod:
        pod.create("c1", "1")

        def sources() -> set[str]:
            threads = [t for t in node.sandboxes()["p1"]["threads"] if t["tgid"] == pod.kata.pid]
            return {thread["source"] for thread in threads} if threads else {"none"}

        try:
            wait_for(lambda: sources() <= {"debugfs", "kvm-fd", "qmp", "flags"}, "all to be named")
        except TimeoutError as error:
            error.add_note(str(sources()))
            raise


def test_without_kvm_hotplugged_vcpus_are_no_lack(node: Node) -> None:
    """Nothing names them, so no one is told to make a VM larger that has them already."""
    node.start()
    machine = Machine(boot=1, maximum=4)
    with node.pod("p1", machine=machine, accelerator=Accelerator.TCG) as pod:
        pod.announce()
        pod.create("c1", "0,1", exclusive=True)
        pod.kata.shim.plug(2)

        def said() -> str:
            notes = {note["code"]: note["text"] for note in node.sandboxes()["p1"]["notes"]}
            text: str = notes.get("fewer-vcpus", "")
            return text if "and 2 threads that may be vCPUs for 2" in text else ""

        assert "default_vcpus" not in wait_for(said, "the threads to be doubted")


def test_it_can_be_switched_off(node: Node) -> None:
    """With qmp.enabled false nothing is connected to; roles come from elsewhere."""
    node.configure(qmp={"enabled": "false"})
    node.start()
    with node.pod("p1", extra_monitor=True) as pod:
        pod.create("c1", "1")
        threads = _by_tid(node.wait_state("p1", "ok"))
        assert "qmp" not in {thread["source"] for thread in threads.values()}
