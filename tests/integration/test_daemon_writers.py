"""Kata pins vCPUs too: it keeps them while its own rule holds, and no longer (D13)."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.daemon import Node
from tests.support.qemu import Machine
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]


def test_vcpus_are_katas_while_its_rule_holds(node: Node) -> None:
    """As many vCPUs as CPUs: they are left to enable_vcpus_pinning, said so, and watched there."""
    node.configure(audit={"affinity_s": 0.2, "deep_s": 3600})
    node.start()
    with node.pod("p1", vcpu_pinning=True) as pod:
        pod.announce()
        pod.create("c1", "0,1", exclusive=True)
        assert pod.misplaced({0, 1}) == []  # pairs would be 0→0 1→1
        shown = node.wait_state("p1", "ok")
        assert "kata-pins-vcpus" in [note["code"] for note in shown["notes"]]
        states = {t["state"] for t in shown["threads"] if t["role"] == "vcpu"}
        assert states == {"unmanaged"}
        assert _watched(node, pod.id) == set()
        for index, tid in pod.kata.vcpus().items():
            os.sched_setaffinity(tid, {index})
        wait_for(lambda: _watched(node, pod.id) == {0, 1}, "the watch to see Kata's pairs")
        pod.stop("c1")
        pod.create("c2", "1", exclusive=True)
        pod.wait_placed({1})
        assert "kata-pins-vcpus" not in str(node.sandboxes()["p1"]["notes"])


def _watched(node: Node, sandbox_id: str) -> set[int]:
    rows = node.ask("watch")["pcpus"]
    return {one["cpu"] for one in rows if one["sandbox"] == sandbox_id}


def test_pins_that_were_there_before_are_given_back_together(node: Node) -> None:
    """vCPUs that somebody had pinned one by one are not all released to one of those CPUs."""
    with node.pod("p1") as pod:
        for index, tid in pod.kata.vcpus().items():
            os.sched_setaffinity(tid, {index % 2})
        node.start()
        pod.create("c1", "0")
        pod.wait_placed({0})
        assert node.cli("unpin", pod.id).returncode == 0
        assert {tuple(os.sched_getaffinity(tid)) for tid in pod.kata.vcpus().values()} == {(0, 1)}


def test_a_vmm_that_was_confined_before_its_exec(node: Node) -> None:
    """As an annotation of Kata's is to do it: that moves nothing later, and is no other writer."""
    pod = node.pod("p1", machine=Machine(boot=1, maximum=1))
    pod.kata.before_vmm = lambda: os.sched_setaffinity(pod.kata.shim.pid, {0})
    node.start()
    with pod:
        assert pod.misplaced({0}) == []
        pod.announce()
        pod.create("c1", "1", exclusive=True)
        pod.wait_placed({1})
        node.ask("reconcile", sandbox=pod.id)
        shown = node.wait_state("p1", "ok")
        assert shown["writers"] == []
        assert pod.misplaced({1}) == []


def test_an_annotation_leaves_vcpus_to_kata_where_its_state_cannot_be_read(node: Node) -> None:
    """Without persist.json the sandbox's own config.json says that Kata pins, and is named."""
    node.start()
    with node.pod("p1") as pod:
        pod.kata.persist_path.unlink()
        key = "io.katacontainers.enable_vcpus_pinning"
        file = pod.write_bundle(pod.id, kind="sandbox") / "config.json"
        config = json.loads(file.read_text())
        config["annotations"][key] = "true"
        file.write_text(json.dumps(config))
        node.hook("createRuntime", pod.id, pod.kata.pid)
        pod.write_bundle("c1", "0,1", exclusive=True)
        node.hook("createRuntime", "c1", pod.kata.pid)
        shown = node.wait_state("p1", "ok")
        (writer,) = shown["writers"]
        assert (writer["name"], writer["active"]) == ("kata", True)
        assert f"annotation {key} in config.json" in writer["evidence"]
        assert "(" not in writer["evidence"], "it is printed in brackets"
        assert "Kata pins the vCPUs" in node.cli("show", pod.id).stdout
        pod.kata.write_persist(pod.kata.containers)  # Kata's own word, once it is there
        node.ask("reconcile", sandbox=pod.id)
        assert node.sandboxes()["p1"]["writers"] == []
