"""`kata-pin uninstall` on a node whose pods run: pins are given back, files go, pods live on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.node import Node
from tests.e2e.nodepods import EXCLUSIVE, SHARED, VmThreads, installed_hooks, node_pods
from tests.e2e.unit import UNIT, Unit
from tests.support.minikata import Minikata, MinikataContainer

pytestmark = pytest.mark.usefixtures("kvm", "untouched")

POD = "un-p1"
MANIFEST = Path("/var/lib/kata-pin/installed")
INSTALL = (
    ("kata-pin", "install", "--containerd"),
    ("systemd-sysusers",),
    ("systemd-tmpfiles", "--create", "kata-pin.conf"),
    ("systemctl", "daemon-reload"),
    ("systemctl", "enable", "--now", UNIT),
)
"""What tests/lab/install.py did, and docs say."""


@pytest.fixture
def unit(node: Node) -> Iterator[Unit]:
    """The installed unit; installed again at the end, for the tests that follow."""
    yield Unit(node)
    for step in INSTALL:
        node.run(step, seconds=60)
    Unit(node).wait_running()


@pytest.fixture
def pod(node: Node, tmp_path: Path) -> Iterator[tuple[Minikata, MinikataContainer]]:
    """A pod with an exclusive and a shared container."""
    with (
        node_pods(node, tmp_path, default_vcpus=1) as kata,
        kata.container(POD, POD, hooks=installed_hooks()) as sandbox,
        kata.container("un-app", POD, hooks=installed_hooks(), cpus="4", **EXCLUSIVE) as app,
        kata.container("un-log", POD, hooks=installed_hooks(), cpus="6-7", **SHARED) as log,
    ):
        for one in (sandbox, app, log):
            one.start()
        yield kata, app


def test_uninstall_gives_every_mask_back_and_removes_its_files(
    node: Node, unit: Unit, pod: tuple[Minikata, MinikataContainer]
) -> None:
    """Every thread has all CPUs of its cgroup again, also when that grows; no pass pins it anew."""
    kata, app = pod
    threads = VmThreads(kata.qemu_pid(POD))
    node.wait(lambda: not threads.misplaced({15: 4}, {6, 7}), "pins of the pod", seconds=30)
    helpers = [one["tid"] for one in unit.sandbox(POD)["threads"] if one["role"] == "virtiofsd"]
    assert {frozenset(os.sched_getaffinity(tid)) for tid in helpers} == {frozenset({6, 7})}
    # `<digest>  <path>`, or `# <path> -> <target>` of a link (cli/node/changes.py)
    files = [Path(line.split()[1]) for line in MANIFEST.read_text().splitlines()]
    assert len(files) >= 5
    assert all(file.exists() for file in files)

    said = node.run(["kata-pin", "uninstall"], seconds=60)

    assert "restored all affinities (by the daemon)" in said
    assert not threads.misplaced({}, {4, 6, 7})
    everything = frozenset(range(node.cpus))
    assert {frozenset(os.sched_getaffinity(tid)) for tid in helpers} == {everything}
    assert not [file for file in (*files, MANIFEST) if file.exists()]
    unit.ask("reconcile")  # a pass, as an event would bring
    assert not threads.misplaced({}, {4, 6, 7})
    node.run(["systemctl", "disable", "--now", UNIT], seconds=60)
    node.run(["systemctl", "daemon-reload"], seconds=60)
    assert unit.show("LoadState")["LoadState"] == "not-found"
    assert not threads.misplaced({}, {4, 6, 7})

    app.update("4-5")  # nothing of ours is left to follow it
    assert not threads.misplaced({}, {4, 5, 6, 7})
