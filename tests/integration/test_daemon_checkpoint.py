"""The kubelet's checkpoint, followed by events alone: audits come once an hour here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoint import checkpoint, replace
from tests.support.daemon import Node, Pod, private_node
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]

UID = "0f8f5e2a-6b1c"
SHARED = checkpoint("0-1")
HELD = checkpoint("0", {UID: {"work": "1"}})


@pytest.fixture
def pod(node: Node) -> Iterator[Pod]:
    """A pod that nothing says to be Guaranteed: `work` has CPU 1, `side` has CPU 0."""
    with node.pod("p1") as pod:
        node.start()
        pod.announce()
        _create(pod, "c1", "1", "work")
        _create(pod, "c2", "0", "side")
        pod.wait_placed({0, 1})
        yield pod


def _create(pod: Pod, container_id: str, cpus: str | None, name: str) -> None:
    """Create a container with the annotations that match it to the checkpoint."""
    path = pod.write_bundle(container_id, cpus) / "config.json"
    config = json.loads(path.read_text())
    config["annotations"] |= {
        "io.kubernetes.cri.container-name": name,
        "io.kubernetes.cri.sandbox-uid": UID,
    }
    path.write_text(json.dumps(config))
    pod.persist(container_id, cpus)
    pod.node.hook("createRuntime", container_id, pod.kata.pid)


def _file(node: Node) -> Path:
    return node.root / "cpu_manager_state"


def _claims(node: Node) -> dict[str, tuple[str, str]]:
    shown = node.sandboxes()["p1"]["containers"]
    return {one["name"]: (one["exclusive"], one["provenance"]) for one in shown}


def test_who_holds_what(node: Node, pod: Pod) -> None:
    """By pod uid and container name: what one gets alone, it is paired with; it is given back."""
    replace(_file(node), SHARED)
    replace(_file(node), HELD)
    pod.wait_placed({0}, {1: 1}, within_s=3.0)
    assert _claims(node)["work"] == ("1", "kubelet")
    assert _claims(node)["side"] == ("", "kubelet")
    replace(_file(node), SHARED)
    pod.wait_placed({0, 1}, within_s=3.0)


def test_another_pods_entry_is_not_ours(node: Node, pod: Pod) -> None:
    """The same container name in another pod, and this pod with another name, give nothing."""
    replace(_file(node), checkpoint("0", {"other": {"work": "1"}, UID: {"job": "1"}}))
    wait_for(lambda: node.ask("state")["node"]["kubelet"], "the checkpoint to be known")
    wait_for(lambda: _claims(node)["work"] == ("", "kubelet"), "the kubelet's answer")
    assert pod.misplaced({0, 1}) == []


def test_what_another_pod_gets_is_left_at_once(node: Node, pod: Pod) -> None:
    """Before any cpuset is written: the threads' cgroups allow both CPUs all the time."""
    replace(_file(node), SHARED)
    replace(_file(node), checkpoint("0", {"other": {"work": "1"}}))
    pod.wait_placed({0}, within_s=3.0)
    notes = [one["code"] for one in node.sandboxes()["p1"]["notes"]]
    assert "held-by-others" in notes
    replace(_file(node), SHARED)
    pod.wait_placed({0, 1}, within_s=3.0)


@pytest.mark.parametrize("end", ["absence", "policy"])
def test_a_checkpoint_that_means_nothing_any_more(node: Node, pod: Pod, end: str) -> None:
    """It is removed, or its policy is none: nothing is exclusive by it."""
    replace(_file(node), HELD)
    pod.wait_placed({0}, {1: 1}, within_s=3.0)
    if end == "absence":
        _file(node).unlink()
    else:
        replace(_file(node), checkpoint("0", {UID: {"work": "1"}}, policy="none"))
    pod.wait_placed({0, 1}, within_s=3.0)


@pytest.mark.parametrize(
    "text", ["", HELD[: len(HELD) // 2], HELD.replace('"0\\"', '"1\\"'), "[]", "\0" * 512]
)
def test_damage_keeps_the_last_good_one_and_is_said(node: Node, pod: Pod, text: str) -> None:
    """Half a file, another checksum, nonsense: what was known holds, and show says so."""
    assert text != HELD
    replace(_file(node), HELD)
    pod.wait_placed({0}, {1: 1}, within_s=3.0)
    _file(node).write_text(text)

    def noted() -> list[str]:
        notes = node.ask("state")["notes"]
        return [note["text"] for note in notes if note["code"] == "kubelet-checkpoint"]

    (said,) = wait_for(noted, "the damage to be said")
    assert said.endswith("using the last valid one")
    assert pod.misplaced({0}, {1: 1}) == []
    replace(_file(node), SHARED)
    pod.wait_placed({0, 1}, within_s=3.0)
    assert noted() == []


def test_a_folder_that_appears_later(node: Node) -> None:
    """A kubelet that is installed after the daemon has started."""
    file = node.root / "lib/kubelet/cpu_manager_state"
    node.configure(paths=node.settings["paths"] | {"kubelet_state": str(file)})
    with node.pod("p1") as pod:
        node.start()
        pod.announce()
        _create(pod, "c1", "1", "work")
        _create(pod, "c2", "0", "side")
        pod.wait_placed({0, 1})
        file.parent.mkdir(parents=True)
        replace(file, HELD)
        pod.wait_placed({0}, {1: 1}, within_s=3.0)


def test_events_dropped_and_the_audit_converges() -> None:
    """With no file watched the deep audit finds the checkpoint's change."""
    often = {"affinity_s": 0.1, "deep_s": 0.2}
    with private_node(audit=often, changes="audit") as node, node.pod("p1") as pod:
        node.start()
        pod.announce()
        _create(pod, "c1", "1", "work")
        _create(pod, "c2", "0", "side")
        pod.wait_placed({0, 1})
        replace(_file(node), HELD)
        pod.wait_placed({0}, {1: 1})


def test_a_vm_that_is_only_starting_is_off_others_cpus(node: Node) -> None:
    """No hook ran and Kata has written nothing yet: its exec alone says that there is a VMM."""
    replace(_file(node), checkpoint("0", {"other": {"work": "1"}}))
    node.start()
    with node.pod("p1", booting=True) as pod:
        pod.wait_placed({0}, within_s=1.0)
        assert node.sandboxes()["p1"]["containers"] == []
        pod.announce()
        _create(pod, "c1", None, "work")
        pod.wait_placed({0})
    wait_for(lambda: "p1" not in node.sandboxes(), "the sandbox to end")


def test_a_dra_claim_of_another_pod_is_left_at_once(node: Node, pod: Pod) -> None:
    """Its CDI spec is written before the driver narrows anybody; it is used again when it ends."""
    folder = Path(node.settings["paths"]["cdi"])
    folder.mkdir(exist_ok=True)
    uid = "0f8f5e2a-6b1c-4a55-9a51-0d1a6a1e7c11"
    edits = {"env": [f"DRA_CPUSET_{uid}=1"]}
    device = {"name": f"claim-{uid}", "containerEdits": edits}
    spec = {"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": [device]}
    file = folder / f"dra.k8s.io-cpu_claim-{uid}.json"
    fresh = folder / "spec.1.tmp"
    fresh.write_text(json.dumps(spec))
    fresh.rename(file)
    # `work` has exactly that CPU: to be the claim's, and `side` and the overhead leave it
    pod.wait_placed({0}, {1: 1}, within_s=3.0)
    assert _claims(node)["work"] == ("1", "claim")
    file.unlink()
    pod.wait_placed({0, 1}, within_s=3.0)
    edits["env"] = [f"DRA_CPUSET_{uid}=0"]
    fresh.write_text(json.dumps(spec | {"devices": [device]}))
    fresh.rename(file)
    wait_for(lambda: _claims(node)["side"] == ("0", "claim"), "the claim to be side's")
