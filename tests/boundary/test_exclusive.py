"""CPUs that are exclusive: by the kubelet's checkpoint, by claims of DRA, and as inferred (D28).

They are followed by events alone, as audits come once an hour.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node
from tests.support.checkpoint import checkpoint, replace

SHARED = checkpoint("4-5")
HELD = checkpoint("4", {"uid-p1": {"work": "5"}})
CUT = (HELD[: len(HELD) // 2], HELD.replace('"4\\"', '"5\\"'))


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path) as one:
        yield one


async def _pod(node: Node) -> Vm:
    """Return a pod that nothing says to be Guaranteed: `work` has CPU 5, `side` has CPU 4."""
    vm = node.vm("p1")
    await node.create(vm, "work", "5")
    await node.create(vm, "side", "4")
    await node.placed(vm, main="4-5", v1="4-5")
    return vm


async def _claims(node: Node, vm: Vm) -> dict[str, tuple[str, str]]:
    shown = (await node.shown(vm))["containers"]
    return {one["name"]: (one["exclusive"], one["provenance"]) for one in shown}


GIVEN = {
    "its own": (HELD, "4", "5"),
    "another pod's": (checkpoint("4", {"o": {"work": "5"}}), "4", "4"),
    "other names": (checkpoint("4-5", {"o": {"work": "7"}, "uid-p1": {"job": "6"}}), "4-5", "4-5"),
}
"""Checkpoints, and where they put the main thread and vCPU 1."""


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("end", ["shared", "absent", "none"])
async def test_what_the_kubelet_gave(node: Node, given: str, end: str) -> None:
    """By pod uid and container name, before any cpuset is written; until it means nothing more."""
    text, main, vcpu = GIVEN[given]
    work = "5" if text == HELD else ""
    vm = await _pod(node)
    replace(node.host.kubelet_state, text)
    await node.placed(vm, main=main, v1=vcpu)
    while await _claims(node, vm) != {"work": (work, "kubelet"), "side": ("", "kubelet")}:
        await node.pause()
    codes = {one["code"] for one in (await node.shown(vm))["notes"]}
    assert ("held-by-others" in codes) is (main == vcpu == "4")
    if end == "absent":
        node.host.kubelet_state.unlink()
    else:
        none = checkpoint("4", {"uid-p1": {"work": "5"}}, policy="none")
        replace(node.host.kubelet_state, SHARED if end == "shared" else none)
    await node.placed(vm, main="4-5", v1="4-5")


@pytest.mark.parametrize("text", ["", *CUT, "[]", "\0" * 512])
async def test_damage_keeps_the_last_valid_one(node: Node, text: str) -> None:
    """Half a file, another checksum, nonsense: what was known holds, and a note says so."""

    async def noted() -> list[str]:
        notes = (await node.ask("state"))["notes"]
        return [one["text"] for one in notes if one["code"] == "kubelet-checkpoint"]

    assert text != HELD
    vm = await _pod(node)
    replace(node.host.kubelet_state, HELD)
    await node.placed(vm, main="4", v1="5")
    node.host.kubelet_state.write_text(text)
    while not (said := await noted()):
        await node.pause()
    assert said[0].endswith("using the last valid one")
    await node.ask("reconcile")
    assert (vm.masks["main"], vm.masks["v1"]) == ("4", "5")
    replace(node.host.kubelet_state, SHARED)
    await node.placed(vm, main="4-5", v1="4-5")
    assert await noted() == []


async def test_a_folder_that_appears_later(tmp_path: Path) -> None:
    """A kubelet that is installed after the daemon has started."""
    node = Node(tmp_path)
    file = tmp_path / "lib/kubelet/cpu_manager_state"
    node.change(paths=node.settings["paths"] | {"kubelet_state": str(file)})
    async with node:
        vm = await _pod(node)
        file.parent.mkdir(parents=True)
        replace(file, HELD)
        await node.placed(vm, main="4", v1="5")


async def test_without_events_audits_find_it(tmp_path: Path) -> None:
    """No file is watched: neither the checkpoint, nor Kata's state, nor a cpuset."""
    audit = {"affinity_s": 10, "deep_s": 60}
    async with Node(tmp_path, audit=audit, changes="audit") as node:
        vm = await _pod(node)
        replace(node.host.kubelet_state, HELD)
        vm.persist(side="3")
        for _ in range(30):
            await node.pause()
        assert vm.masks["main"] == "4-5"
        await node.clock.move(61)
        await node.placed(vm, main="3", v1="5")
        node.host.cgroup(f"/kata_{vm.id}", "5-9")
        await node.clock.move(61)
        await node.placed(vm, main="5")


async def test_a_dra_claim(node: Node) -> None:
    """Its CDI spec is written before the driver narrows anybody; it is used again when it ends."""
    vm = await _pod(node)
    uid = "0f8f5e2a-6b1c-4a55-9a51-0d1a6a1e7c11"
    folder = Path(node.settings["paths"]["cdi"])
    folder.mkdir(exist_ok=True)

    def claim(cpus: str) -> None:
        device = {"name": "claim", "containerEdits": {"env": [f"DRA_CPUSET_{uid}={cpus}"]}}
        spec = {"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": [device]}
        replace(folder / "claim.json", json.dumps(spec))

    claim("5")  # `work` has exactly that CPU: to be the claim's; `side` and overhead leave it
    await node.placed(vm, main="4", v1="5")
    assert (await _claims(node, vm))["work"] == ("5", "claim")
    (folder / "claim.json").unlink()
    await node.placed(vm, main="4-5", v1="4-5")
    claim("4")
    while (await _claims(node, vm))["side"] != ("4", "claim"):
        await node.pause()


async def test_a_vm_that_only_starts_is_off_others_cpus(node: Node) -> None:
    """No hook ran and Kata has written nothing yet: its exec alone says that there is a VMM."""
    replace(node.host.kubelet_state, checkpoint("0-14", {"other": {"work": "15"}}))
    vm = node.vm("p1")
    node.kernel.connector.executed(vm.pid)
    await node.placed(vm, main="0-14")
    assert (await node.shown(vm))["containers"] == []


async def test_a_vm_that_boots_beside_exclusive_cpus(node: Node) -> None:
    """Without a checkpoint it keeps off them too, follows them, and has all when they are free.

    The next daemon knows from its records, before a pass over the other sandbox has run. An undo
    ends kata-pin's work for the owner, whose containers' CPUs stay its own.
    """
    owner, guest = node.vm("p2"), node.vm("p1")  # after a restart p1's pass is the first
    await node.create(guest, guest.id)
    await node.create(owner, "c1", "0-3", exclusive=True)
    await node.placed(guest, main="4-15", v0="4-15")
    shown = await node.shown(guest)
    assert (shown["state"], shown["mask"]) == ("ok", "4-15")
    assert shown["mask_origin"].startswith("CPUs that no other pod has exclusively")
    await node.kill()
    await node.start()
    await node.ask("reconcile")
    rows = (await node.ask("history", sandbox=guest.id))["changes"]
    assert [row["state"] for row in rows] == ["unpinned", "ok"]
    await node.ask("unpin", sandbox=owner.id)
    await node.ask("reconcile")
    assert guest.masks["main"] == "4-15"
    await node.ask("pin", sandbox=owner.id)
    await node.create(owner, "c2", "4-15", exclusive=True)  # now there is no better place
    await node.placed(guest, main="0-15")
    assert (await node.shown(guest))["mask"] is None
    await node.stopped(owner, "c1")
    await node.placed(guest, main="0-3")
    await node.stopped(owner, "c2")
    await node.placed(guest, main="0-15")
